# SPDX-License-Identifier: Apache-2.0
"""speccompile triton: a bundle as a model repository of Triton Inference Server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from speccompile.cli.options import MAX_THREADS
from speccompile.cli.output import errors_as_json, print_json

LAYOUTS = ("model", "trtllm", "plans")


def triton_command(
    bundle: Annotated[Path, typer.Argument(help="A bundle's folder.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Model repository; other models in it stay.")],
    layout: Annotated[
        str, typer.Option(help="model; trtllm: five models as the TensorRT-LLM backend had; plans: tensorrt models.")
    ] = "model",
    backends: Annotated[
        Path | None, typer.Option(help="Backend directory to write `speccompile` into; default: beside -o.")
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the model.")] = "speccompile",
    max_batch_size: Annotated[int, typer.Option(min=0, help="Rows a request may hold; 0: no batch dim.")] = 0,
    link: Annotated[bool, typer.Option("--link", help="Refer to the bundle where it is; copy nothing.")] = False,
    python_env: Annotated[
        Path | None, typer.Option(help="Python environment with speccompile; that on the server's PATH by default.")
    ] = None,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that may wait; more are refused.")] = 256,
    timeout_s: Annotated[float | None, typer.Option(help="Most seconds of a request.")] = None,
    speculation: Annotated[str, typer.Option(help="auto, on or off, where a request says nothing.")] = "auto",
    drain_s: Annotated[float, typer.Option(min=0.0, help="Seconds that running requests get at unload.")] = 30.0,
    method: Annotated[str | None, typer.Option(help="Another speculation method than the recipe's.")] = None,
    backend: Annotated[str | None, typer.Option(help="Another engine backend than the recipe's.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, max=MAX_THREADS, help="Threads of the target's engine.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Write a model repository for Triton, and the backend that its models name. Needs no Triton, no GPU, no torch."""
    if layout not in LAYOUTS:
        raise typer.BadParameter(f"--layout is one of {', '.join(LAYOUTS)}")
    if speculation not in ("auto", "on", "off"):
        raise typer.BadParameter("--speculation is one of auto, on, off")
    from speccompile.serving.triton.repository import RepositoryOptions, check_backend, write_backend, write_repository
    from speccompile.serving.triton.settings import Settings

    settings = Settings(
        max_queue=max_queue,
        timeout_s=timeout_s or 0.0,
        speculation=speculation,
        drain_s=drain_s,
        method=method or "",
        backend=backend or "",
        threads=threads or 0,
    )
    options = RepositoryOptions(layout, name, max_batch_size, link, python_env, settings)
    with errors_as_json(as_json):
        directory = None if layout == "plans" else backends or Path(os.path.abspath(output)).parent / "backends"
        if directory is not None:
            check_backend(directory)
        models = write_repository(bundle, output, options)
        home = None if directory is None else write_backend(directory)
    if as_json:
        print_json({"repository": str(output), "models": models, "backend": None if home is None else str(home)})
        return
    typer.echo(f"{output}: {', '.join(models)}")
    if home is not None:
        typer.echo(f"{home}: goes beside Triton's own `python` backend, in the directory of --backend-directory")
