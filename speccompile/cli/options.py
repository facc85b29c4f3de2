# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share, checked before anything is loaded: of logs, sampling, and models.

A command may take a model or a recipe in the place of a bundle; here is the bundle that it becomes.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speccompile.backends.machine import num_usable_cores
from speccompile.cli.output import LOG_LEVELS, live_stages, print_warning, quiet_libraries, show_logs
from speccompile.common.parameters import FLAG, INTEGER, NUMBER, STRINGS, TEXT, TOKENS, Kind, SamplingParameter
from speccompile.core.sampling_params import SAMPLING_PARAMETERS, SamplingParams
from speccompile.errors import BundleError, RuntimeFault

if TYPE_CHECKING:
    from speccompile.prepare import Prepared
    from speccompile.recipe.model_recipe import ModelOptions
    from speccompile.runtime.spec_engine import SpecEngine


MAX_THREADS = 1024  # as engine.threads of a recipe
LogLevel = Annotated[
    str | None, typer.Option(envvar="SPECCOMPILE_LOG", help="What is logged on stderr: error, warning, info or debug.")
]


def usable_threads(threads: int | None) -> int | None:
    """Returns `--threads`, cut with a warning to the cores that there are: engines that spin take turns else."""
    cores = num_usable_cores()
    if threads is None or threads <= cores:
        return threads
    print_warning(f"--threads {threads}: this machine has {cores} cores, and so many threads are used")
    return cores


def with_log_level(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command with `--log-level`, which applies before it runs. One that has `log_level` gets it, too."""
    parameters = inspect.signature(command, eval_str=True).parameters
    takes_level = "log_level" in parameters
    own = inspect.Parameter("log_level", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=LogLevel)

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        level = arguments["log_level"] if takes_level else arguments.pop("log_level")
        if level is not None and level not in LOG_LEVELS:
            raise typer.BadParameter(f"one of {', '.join(LOG_LEVELS)}", param_hint="--log-level")
        show_logs(level or "warning")
        command(**arguments)

    every = [*parameters.values(), *([] if takes_level else [own])]
    run.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    return run


SAMPLING = "sampling"  # of a command: what was given, by the names of parameters
# Biases are for prompt files: a mapping is no option.
_TYPES: Mapping[Kind, Any] = {INTEGER: int, NUMBER: float, STRINGS: list[str], FLAG: bool, TOKENS: list[int], TEXT: str}


def with_sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command with an option for each sampling parameter that has a flag, in place of its `sampling`."""
    flagged = {name: declared for name, declared in SAMPLING_PARAMETERS.items() if declared.flag is not None}

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        values = {name: arguments.pop(name) for name in flagged}
        given = {name: value for name, value in values.items() if value not in (None, [])}
        command(**arguments, **{SAMPLING: given})

    signature = inspect.signature(command, eval_str=True)
    found = dict(signature.parameters)
    names = list(found)
    at = names.index(SAMPLING)
    options = [_option(name, declared) for name, declared in flagged.items()]
    in_order = [*(found[name] for name in names[:at]), *options, *(found[name] for name in names[at + 1 :])]
    run.__signature__ = signature.replace(parameters=in_order)  # type: ignore[attr-defined]
    return run


def _option(name: str, declared: SamplingParameter) -> inspect.Parameter:
    assert declared.flag is not None
    # Of a number between two bounds the parameter's own message names both.
    least = declared.ge if declared.kind is INTEGER or declared.le is None else None
    option = typer.Option(min=least, help=declared.flag.help or declared.description)
    kind_type: Any = _TYPES[declared.kind]
    annotation: Any = Annotated[kind_type | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def check_sampling(given: Mapping[str, Any]) -> None:
    """Refuses values out of range by their command-line names. Raises typer.BadParameter: one of them is."""
    try:
        SamplingParams(**given)
    except RuntimeFault as fault:
        option = "--" + fault.where.rpartition(".")[2].replace("_", "-")
        raise typer.BadParameter(f"got {fault.got}; expected {fault.expected}", param_hint=option) from fault


MODEL_ARGUMENT = "model"  # of a command: the `ModelOptions`
SOURCE_HELP = "A bundle's folder; or a checkpoint's folder, a GGUF file, an id of the hub or a recipe: built first."
GENERATION_CONFIGS = ("auto", "none")
SMALL_FILES = ("config.json", "tokenizer_config.json", "chat_template.jinja")  # of a checkpoint, for its template


def _options(
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. engine.threads=2.")
    ] = None,
    quantization: Annotated[
        str | None, typer.Option(help="Short for --set target.quantization=...: auto, none, int8 or int4.")
    ] = None,
    lora: Annotated[
        str | None, typer.Option(help="Short for --set target.lora=...: a LoRA adapter in PEFT's layout.")
    ] = None,
    num_layers: Annotated[
        int | None, typer.Option(min=1, help="Short for --set target.num_layers=...: with random weights, for sizing.")
    ] = None,
    max_seq_len: Annotated[
        int | None,
        typer.Option(
            "--max-seq-len",
            "--max-model-len",
            min=1,
            help="Short for --set engine.max_seq_len=...: tokens of a sequence.",
        ),
    ] = None,
    max_batch_size: Annotated[
        int | None,
        typer.Option(
            "--max-batch-size",
            "--max-num-seqs",
            min=1,
            help="Short for --set engine.max_batch_size=...: sequences at once.",
        ),
    ] = None,
    speculative_config: Annotated[
        str | None, typer.Option(metavar="JSON", help='As of vLLM: {"method", "model", "num_speculative_tokens"}.')
    ] = None,
    spec_method: Annotated[str | None, typer.Option(help="The drafter's method alone, by our name or vLLM's.")] = None,
    spec_model: Annotated[
        str | None, typer.Option("--spec-model", "--draft", help="Its checkpoint; the method is that of its layout.")
    ] = None,
    spec_tokens: Annotated[int | None, typer.Option(min=1, help="Its number of draft tokens.")] = None,
    generation_config: Annotated[
        str, typer.Option(help="auto: a model's generation_config.json gives sampling defaults; none: it does not.")
    ] = "auto",
) -> None: ...


def with_model_options(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command with the options of a model in the place of its argument `model`."""
    options = inspect.signature(_options, eval_str=True).parameters

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        command(**{MODEL_ARGUMENT: _read(**{name: arguments.pop(name) for name in options})}, **arguments)

    signature = inspect.signature(command, eval_str=True)
    found = [parameter for name, parameter in signature.parameters.items() if name != MODEL_ARGUMENT]
    named = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in options.values()]
    run.__signature__ = signature.replace(parameters=[*found, *named])  # type: ignore[attr-defined]
    return run


def _read(
    overrides: list[str] | None,
    quantization: str | None,
    lora: str | None,
    num_layers: int | None,
    max_seq_len: int | None,
    max_batch_size: int | None,
    speculative_config: str | None,
    spec_method: str | None,
    spec_model: str | None,
    spec_tokens: int | None,
    generation_config: str,
) -> ModelOptions:
    from speccompile.recipe.model_recipe import ModelOptions
    from speccompile.recipe.speculative_config import METHOD, MODEL, NUM_TOKENS, read_speculative_config

    if generation_config not in GENERATION_CONFIGS:
        raise typer.BadParameter(f"one of {', '.join(GENERATION_CONFIGS)}", param_hint="--generation-config")
    settings = [*(overrides or ())]
    settings += [f"target.quantization={quantization}"] if quantization is not None else []
    settings += [f"target.lora={json.dumps(lora)}"] if lora is not None else []
    settings += [f"target.num_layers={num_layers}"] if num_layers is not None else []
    settings += [f"engine.max_seq_len={max_seq_len}"] if max_seq_len is not None else []
    settings += [f"engine.max_batch_size={max_batch_size}"] if max_batch_size is not None else []
    given = {} if speculative_config is None else read_speculative_config(speculative_config)
    short = {METHOD: spec_method, MODEL: spec_model, NUM_TOKENS: spec_tokens}
    given |= {key: value for key, value in short.items() if value is not None}
    return ModelOptions(given, tuple(settings), generation_config == "auto")


def check_template(source: str, model: ModelOptions) -> None:
    """Refuses what would be built of a checkpoint without a chat template.

    Raises:
        RuntimeFault: the packages that templates need are not installed.
        BundleError: it has none.
    """
    from speccompile.bundle.publish import find_bundle, is_hub_id
    from speccompile.checkpoints.folders import resolve_checkpoint
    from speccompile.common.chat_prompts import find_template
    from speccompile.prepare import is_model, is_recipe
    from speccompile.recipe import load_recipe
    from speccompile.recipe.speculative_config import verifier_of

    target = source
    if is_recipe(source):
        section = load_recipe(source, model.settings).target
        if section.weights == "random":
            return
        target = section.model
    elif not is_model(source) or (is_hub_id(source) and find_bundle(source) is not None):
        return  # a bundle
    folder = resolve_checkpoint(target, SMALL_FILES)
    verifier = verifier_of(folder)
    if verifier is not None:  # a speculator's template is that of its target
        target, folder = verifier, resolve_checkpoint(verifier, SMALL_FILES)
    find_template(folder, target)


def load_source(
    source: str,
    model: ModelOptions,
    *,
    method: str | None,
    backend: str | None,
    threads: int | None,
    allow_synthetic_acceptance: bool = False,
) -> tuple[SpecEngine, str]:
    """Loads a bundle, or that of a model or recipe, built if need be; returns the engine, and the name for clients.

    Args:
        source: a bundle's folder, a recipe, a checkpoint's folder or a hub id.

    Raises:
        typer.BadParameter: options of a build are given with a bundle.
        SpecCompileError: it cannot be built or loaded.
    """
    from speccompile.bundle.publish import find_bundle, is_hub_id
    from speccompile.prepare import check_source, is_model, is_recipe
    from speccompile.runtime.engine import load

    name = ""
    given: dict[str, Any] = {"threads": threads, "allow_synthetic_acceptance": allow_synthetic_acceptance}
    if is_hub_id(source):
        with live_stages():
            folder = find_bundle(source)
        source, name = (source, name) if folder is None else (str(folder), source)
    if is_model(source) or is_recipe(source):
        if backend is not None:
            model, backend = replace(model, settings=(*model.settings, f"engine.backend={backend}")), None
        found = prepare_source(source, model)
        with live_stages():
            return _marked(load(found.path, backend=backend, method=method, verify=False, **given)), found.name
    if model.settings or not model.reads_generation_config:
        first = model.settings[0] if model.settings else "--generation-config none"
        raise typer.BadParameter(f"{source} is built already: {first} is for a model or a recipe")
    if model.speculative and method is not None:
        raise typer.BadParameter("give --method, or a drafter by --speculative-config or --spec-...; not both")
    try:
        chosen = _section_of_bundle(source, model) if model.speculative else method
        with live_stages():
            engine = _marked(load(source, backend=backend, method=chosen, **given))
    except BundleError:
        check_source(source)  # says more of what is no bundle at all
        raise
    return engine, name or ("" if engine.bundle is None else engine.bundle.path.resolve().name)


def _marked(engine: SpecEngine) -> SpecEngine:
    if engine.verifier.rates:
        from speccompile.runtime.synthetic import synthetic_note

        print_warning(synthetic_note(engine.verifier.rates))
    return engine


def _section_of_bundle(source: str, model: ModelOptions) -> dict[str, Any]:
    from speccompile.bundle.bundle import read_bundle
    from speccompile.recipe.speculative_config import METHOD, MODEL, section_from_config

    given = dict(model.speculative)
    if METHOD not in given and MODEL not in given:
        given[METHOD] = read_bundle(source, verify=False).recipe.method
    return section_from_config(given)


def prepare_source(source: str, model: ModelOptions) -> Prepared:
    """Returns the bundle of a model or a recipe, with its stages on stderr. Raises SpecCompileError: it cannot."""
    quiet_libraries()
    from speccompile.bundle.bundle import read_bundle
    from speccompile.cli.child_build import prepare_in_child
    from speccompile.prepare import find_prepared

    with live_stages() as progress:
        found = find_prepared(source, model) or prepare_in_child(source, model, progress)
    bundle = read_bundle(found.path, verify=False)
    form = bundle.graphs["target"].get("form")
    typer.echo(f"{found.name}: method {bundle.recipe.method}, weights {form}, bundle {found.path}", err=True)
    return found
