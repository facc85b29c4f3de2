# SPDX-License-Identifier: Apache-2.0
"""speccompile serve: a bundle as a server with OpenAI's API."""

from __future__ import annotations

import importlib.util
import ipaddress
import json
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speccompile.cli.options import MAX_THREADS, SOURCE_HELP, LogLevel, load_source, usable_threads, with_model_options
from speccompile.common.extras import install_command
from speccompile.errors import RuntimeFault

if TYPE_CHECKING:
    from speccompile.recipe.model_recipe import ModelOptions


def check_seconds(value: float | None) -> float | None:
    """Refuses values that are no times. Raises typer.BadParameter: zero, negative, infinite or no number."""
    if value is not None and not 0 < value < math.inf:
        raise typer.BadParameter(f"{value:g} is not a number of seconds above 0.")
    return value


@with_model_options
def serve_command(
    source: Annotated[str, typer.Argument(metavar="MODEL", help=SOURCE_HELP)],
    model: Any,
    *,
    host: Annotated[
        str, typer.Option(help="Address to listen at; the default is reached from here alone.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 chooses a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="Ask for this key; repeatable. Without it: the keys in SPECCOMPILE_API_KEY, if that is set."),
    ] = None,
    model_name: Annotated[
        str | None,
        typer.Option("--model-name", "--served-model-name", help="Name of the model; that of MODEL by default."),
    ] = None,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that may wait; more get an error 429.")] = 256,
    timeout_s: Annotated[float | None, typer.Option(callback=check_seconds, help="Most seconds of a request.")] = None,
    max_request_bytes: Annotated[int, typer.Option(min=1, help="Largest body.")] = 1 << 20,
    max_connections: Annotated[
        int | None, typer.Option(min=1, help="At once; by default 1000, or what the limit on open files allows.")
    ] = None,
    header_timeout_s: Annotated[
        float, typer.Option(callback=check_seconds, help="Seconds for the header of a request.")
    ] = 10.0,
    body_timeout_s: Annotated[
        float, typer.Option(callback=check_seconds, help="Seconds for the body of a request.")
    ] = 30.0,
    keep_alive_s: Annotated[
        float, typer.Option(callback=check_seconds, help="Seconds that a connection may idle between requests.")
    ] = 75.0,
    write_timeout_s: Annotated[
        float, typer.Option(callback=check_seconds, help="Seconds that a client may take no byte of its answer.")
    ] = 60.0,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="Let pages of this origin send requests (CORS); repeatable.")
    ] = None,
    speculation: Annotated[str, typer.Option(help="auto, on or off, where a request says nothing.")] = "auto",
    drain_s: Annotated[float, typer.Option(min=0.0, help="Seconds that running requests get at SIGTERM.")] = 30.0,
    page: Annotated[bool, typer.Option(help="Show a page at / that watches a generation.")] = True,
    tool_call_parser: Annotated[
        str, typer.Option(help="How the model writes tool calls: auto (by its chat template), none, or a name.")
    ] = "auto",
    reasoning_parser: Annotated[
        str, typer.Option(help="How the model marks reasoning: auto (by its chat template), none, or a name.")
    ] = "auto",
    per_request_spec_decode_metrics: Annotated[
        bool, typer.Option(help="Give metrics with every answer, in vLLM's shape.")
    ] = False,
    vllm_metrics: Annotated[bool, typer.Option(help="Give vLLM's names of speculation's counts at /metrics.")] = False,
    method: Annotated[str | None, typer.Option(help="Another speculation method than the recipe's.")] = None,
    backend: Annotated[str | None, typer.Option(help="Another backend than the recipe's.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, max=MAX_THREADS, help="Threads of the target's engine.")] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="Short for --set target.adapters=...: a LoRA adapter; repeatable."),
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Write all requests with their texts into this new file, for `replay`.")
    ] = None,
    allow_synthetic_acceptance: Annotated[
        bool, typer.Option(help="Serve a bundle with engine.synthetic_acceptance: its texts are not the target's.")
    ] = False,
    log_level: LogLevel = None,
) -> None:
    """Serve a bundle or a model: /v1/completions, /v1/chat/completions, /v1/models, /metrics, /health, and a page at /.

    A model or a recipe is built first, into $SPECCOMPILE_CACHE (~/.cache/speccompile), where the next start finds it.
    """
    check_packages()
    from speccompile.runtime.record import RecordedService, open_new
    from speccompile.runtime.requests import SPECULATION
    from speccompile.runtime.service import Service, ServiceOptions
    from speccompile.serving.openai.app import make_app
    from speccompile.serving.openai.connections import ConnectionLimits
    from speccompile.serving.openai.process import Listener, bind, run
    from speccompile.serving.openai.server import OpenAIServer, ServerOptions, check_keys, keys_from_environment
    from speccompile.serving.openai.tools import check_parsers
    from speccompile.serving.page.routes import page_routes

    wanted = next((name for name in SPECULATION if name == speculation), None)
    if wanted is None:
        raise typer.BadParameter(f"--speculation is one of {', '.join(SPECULATION)}")
    keys = tuple(api_key) if api_key else keys_from_environment(os.environ)
    check_keys(keys, "--api-key")
    check_parsers(tool_call_parser, reasoning_parser)
    if not keys and not is_loopback(host):
        typer.echo(f"warning: {host} is reached from other machines, and no --api-key is asked for", err=True)
    if record is not None:
        open_new(record).close()
        record.unlink()  # it is written once the model is loaded
    limits = ConnectionLimits(header_timeout_s, keep_alive_s, write_timeout_s, max_connections)
    listener = Listener(host, port, drain_s, log_level or "info", limits)
    bound = bind(listener)
    loaded: dict[str, Any] = {"method": method, "backend": backend, "threads": usable_threads(threads)}
    loaded["allow_synthetic_acceptance"] = allow_synthetic_acceptance
    engine, name = load_source(source, with_adapters(model, adapter or ()), **loaded)
    service_options = ServiceOptions(max_queue=max_queue, timeout_s=timeout_s, speculation=wanted)
    service = Service(engine, service_options) if record is None else RecordedService(engine, service_options, record)
    options = ServerOptions(
        model_name or name or None,
        keys,
        max_request_bytes,
        body_timeout_s,
        tuple(allow_origin or ()),
        tool_call_parser,
        reasoning_parser,
        per_request_spec_decode_metrics,
        vllm_metrics,
    )
    server = OpenAIServer(service, options)
    app = make_app(server, [page_routes] if page else [])
    service.start()
    try:
        run(app, service, listener, bound)
    finally:
        service.close()


def with_adapters(model: ModelOptions, given: Sequence[str]) -> ModelOptions:
    """Returns the options of a build with adapters, NAME=PATH each. Raises typer.BadParameter: one is not so."""
    found: dict[str, str] = {}
    for text in given:
        name, _, path = text.partition("=")
        if not name or not path or name in found:
            raise typer.BadParameter(f"got {text!r}; expected NAME=PATH, each name once", param_hint="--adapter")
        found[name] = path
    settings = [f"target.adapters={json.dumps(found)}"] if found else []
    return replace(model, settings=(*model.settings, *settings))


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_packages() -> None:
    """Refuse to start without the server's packages. Raises RuntimeFault: one is missing."""
    for name in ("fastapi", "uvicorn", "prometheus_client", "jinja2"):
        if importlib.util.find_spec(name) is None:
            todo = f"Install them: {install_command('serve')}."
            raise RuntimeFault("speccompile serve", f"no package {name}", "the packages of the extra [serve]", todo)
