# SPDX-License-Identifier: Apache-2.0
"""speccompile inspect: what is in a bundle or in an .onnx file, and what was recorded of a TensorRT plan.

The bytes of a plan are not read: that could run code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from speccompile.backends.distance import Distance
from speccompile.cli.output import errors_as_json, json_from_error, print_error, print_json
from speccompile.errors import BundleError


def inspect_command(
    path: Annotated[Path, typer.Argument(help="A bundle's folder, an .onnx file or a .plan file.")],
    diff: Annotated[
        Path | None, typer.Option(help="Another one: show how recipe and graphs differ from PATH to it, line by line.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show graphs, inputs and outputs, operators, sizes, and whether the digests hold.

    Of a plan the record of its build is shown, which lies beside it; the plan itself is never read, which could run
    code in it. A bundle whose files do not match its manifest is still shown, with exit code 7.
    """
    if diff is not None:
        _print_differences(path, diff, as_json)
        return
    with errors_as_json(as_json):
        is_graph = path.is_file() and path.suffix == ".onnx"
        if path.is_file() and path.suffix == PLAN_SUFFIX:
            facts, fault = facts_from_plan_file(path)
        else:
            facts, fault = (_facts_from_onnx(path), None) if is_graph else _facts_from_bundle(path)
    if as_json:
        print_json({**facts, **({} if is_graph else {"fault": fault and json_from_error(fault)})})
    else:
        _print_facts(facts)
        if fault is not None:
            print_error(fault)
    if fault is not None:
        raise typer.Exit(fault.exit_code)


def _print_differences(first: Path, second: Path, as_json: bool) -> None:
    from speccompile.cli.inspect_diff import differences

    with errors_as_json(as_json):
        found = differences(first, second)
    if as_json:
        print_json({"differences": found})
        return
    for lines in found.values():
        typer.echo("\n".join(lines))
    if not found:
        typer.echo("no difference; of weights type and shape alone are compared")


def _facts_from_bundle(path: Path) -> tuple[dict[str, Any], BundleError | None]:
    from speccompile.bundle.bundle import check_types, read_bundle
    from speccompile.bundle.format import MANIFEST, is_hidden, list_foreign_files, read_json
    from speccompile.bundle.publish import certificate_facts

    fault = None
    try:
        manifest = read_bundle(path).manifest
    except BundleError as error:
        fault = error
        # A manifest that cannot be read leaves nothing to show: that error is the answer.
        manifest = read_json(path / MANIFEST) if path.is_dir() else _refuse(error)
        try:  # of another version, or with values of other types: what it means is not known
            check_types(str(path / MANIFEST), manifest)
        except BundleError:
            raise error from None
    files = manifest["files"]
    facts = {
        "kind": "bundle",
        "path": str(path),
        "digests_ok": fault is None,
        "speccompile_version": manifest.get("speccompile_version"),
        "git_sha": manifest.get("git_sha"),
        "created_at": manifest.get("created_at"),
        "recipe": manifest.get("recipe"),
        "size_bytes": sum(f.get("size_bytes", 0) for f in files.values()),
        "graphs": {name: _facts_from_record(path, record, files) for name, record in manifest["graphs"].items()},
        "files": files,
        "foreign_files": [name for name in list_foreign_files(path, manifest) if not is_hidden(name)],
        "tokenizer": manifest.get("tokenizer"),
        "eos_token_ids": manifest.get("eos_token_ids"),
        "versions": manifest.get("versions"),
        "stages": manifest.get("stages"),
        "certificate": certificate_facts(path, manifest, is_intact=fault is None),
    }
    return facts, fault


def _refuse(error: BundleError) -> dict[str, Any]:
    raise error


def _facts_from_record(path: Path, record: dict[str, Any], files: dict[str, Any]) -> dict[str, Any]:
    spec = record.get("spec", {})
    folder = str(record.get("file", "")).rpartition("/")[0]
    size = sum(f.get("size_bytes", 0) for name, f in files.items() if name.startswith(f"{folder}/"))
    measured = ("forms_measured", "form_distances", "cache_distance", "distance_text", "tuning", "checks", "passes")
    known = (
        "role",
        "file",
        "model",
        "lora",
        "adapters",
        "dims",
        "max_rows",
        "caches",
        "form",
        "quantization",
        "weights",
        "calibration",
        *measured,
    )
    return {
        **{key: record[key] for key in known if key in record},
        "size_bytes": size,
        "inputs": spec.get("inputs", []),
        "outputs": spec.get("outputs", []),
        "op_histogram": record.get("op_histogram", {}),
        **_facts_of_plan(path / str(record.get("file", ""))),
    }


def _facts_of_plan(file: Path) -> dict[str, Any]:
    if file.suffix != PLAN_SUFFIX:
        return {}
    try:
        return {"plan": plan_facts(file)[0]}
    except BundleError:  # the bundle's digests say so already
        return {}


def _facts_from_onnx(path: Path) -> dict[str, Any]:
    from speccompile.cli.inspect_diff import read_graph

    model = read_graph(path)
    import onnx_ir as ir

    from speccompile.passes.base import histogram_from_model

    graph = model.graph
    tensors = [v.const_value for v in graph.initializers.values() if v.const_value is not None]
    external = {path.parent / t.location for t in tensors if isinstance(t, ir.ExternalTensor)}
    return {
        "kind": "onnx",
        "path": str(path),
        "size_bytes": sum(f.stat().st_size for f in {path, *external} if f.exists()),
        "missing_files": sorted(str(f) for f in external if not f.exists()),
        "opsets": dict(model.opset_imports),
        "graphs": {
            graph.name or path.stem: {
                "inputs": [_facts_from_value(v) for v in graph.inputs],
                "outputs": [_facts_from_value(v) for v in graph.outputs],
                "num_weights": sum(t.size for t in tensors),
                "op_histogram": {"after": histogram_from_model(model)},
                "functions": sorted(f"{f.domain}::{f.name}" for f in model.functions.values()),
            }
        },
    }


def _facts_from_value(value: Any) -> dict[str, Any]:
    dims = [] if value.shape is None else [d if isinstance(d, int) else str(d) for d in value.shape]
    return {"name": value.name, "dims": dims, "dtype": "" if value.dtype is None else value.dtype.numpy().name}


def _print_facts(facts: dict[str, Any]) -> None:
    from speccompile.bundle.publish import text_from_facts
    from speccompile.bundle.report import text_from_bytes

    console = Console(soft_wrap=True, highlight=False, markup=False)
    size = text_from_bytes(facts["size_bytes"])
    console.print(Text.assemble((str(facts["kind"]), "bold"), f" {facts['path']}  {size}"))
    if facts["kind"] == "bundle":
        state = ("hold", "green") if facts["digests_ok"] else ("do not hold", "bold red")
        recipe = facts["recipe"] or {}
        method = recipe.get("speculator", {}).get("method")
        backend = recipe.get("engine", {}).get("backend")
        target, engine = recipe.get("target", {}), recipe.get("engine", {})
        sizes = f"{engine.get('max_batch_size')} sequences of {engine.get('max_seq_len')} tokens"
        console.print(f"recipe {target.get('model')}; quantization {target.get('quantization')}; {sizes}")
        for name in facts["foreign_files"]:
            console.print(Text.assemble(("not listed ", "bold red"), name))
        built = f"; method {method}; backend {backend}; built {facts['created_at']}"
        console.print(Text.assemble("digests ", state, built))
        console.print(f"certificate {text_from_facts(facts['certificate'])}")
    for name, graph in facts["graphs"].items():
        size = f"  {text_from_bytes(graph['size_bytes'])}" if "size_bytes" in graph else ""
        console.print(Text.assemble("\n", (str(name), "bold"), size))
        table = Table("", "tensor", "dims", "dtype", box=None, header_style="dim")
        for side in ("inputs", "outputs"):
            for label, tensor in _without_repeats(graph[side]):
                dims = str(tensor["dims"]).replace("'", "")
                table.add_row(*map(Text, (side[:-1], label, dims, tensor["dtype"])))
        console.print(table)
        ops = graph["op_histogram"].get("after", {})
        if ops:
            console.print("operators: " + ", ".join(f"{op} {count}" for op, count in ops.items()))
        for form, row in graph.get("form_distances", {}).items():
            mark = " (chosen)" if form == graph.get("form") else ""
            console.print(f"form {form}{mark}, from float32: {Distance.from_json(row).summary()}")
        if text := graph.get("distance_text"):
            console.print(f"the distances are over text that is {text}")
        merged = [("merged into", graph["lora"])] if graph.get("lora") else []
        for verb, lora in (*merged, *((f"{row['name']!r} for", row) for row in graph.get("adapters", ()))):
            digests = ", ".join(f"{name} {digest[:12]}" for name, digest in lora["sha256"].items())
            console.print(f"LoRA adapter {lora['model']}, {verb} {lora['modules']} modules ({digests})")
        if calibration := graph.get("calibration"):
            told = f"{calibration.get('num_tokens')} tokens, {calibration.get('texts')}"
            console.print(f"int4 weights were chosen over {told}")
        if caches := graph.get("caches"):
            held = text_from_bytes(caches["slot_bytes"])
            kind = f"{caches['dtype']} " if caches.get("dtype") == "int8" else ""
            told = ": windows see no others" if caches.get("slides", True) else ""
            console.print(f"caches keep {caches['rows']} {kind}rows of a sequence ({held}){told}")
        if row := graph.get("cache_distance"):
            console.print(f"int8 caches, from float32 ones: {Distance.from_json(row).summary()}")
        if "plan" in graph:
            print_plan(console, graph["plan"])


def _without_repeats(tensors: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = {}
    for tensor in tensors:
        parts = ["*" if part.isdigit() else part for part in tensor["name"].split(".")]
        rows.setdefault(".".join(parts), []).append(tensor)
    return [
        (f"{label} ({len(group)})" if len(group) > 1 else group[0]["name"], group[0]) for label, group in rows.items()
    ]


PLAN_SUFFIX = ".plan"


def facts_from_plan_file(path: Path) -> tuple[dict[str, Any], BundleError | None]:
    """Returns the facts about a plan, and what is wrong with the digests of plan and record, or None.

    Raises:
        BundleError: there is no record beside the plan, or it is damaged or of another plan.
    """
    plan, fault = plan_facts(path)
    recorded = plan["recorded"] or {}
    sides = {side: recorded.get(side, []) for side in ("inputs", "outputs")}
    graph = {**sides, "op_histogram": {}, "plan": plan}
    facts = {"kind": "plan", "path": str(path), "size_bytes": path.stat().st_size, "graphs": {path.stem: graph}}
    return facts, fault


def plan_facts(path: Path) -> tuple[dict[str, Any], BundleError | None]:
    """Returns {"recorded": the record of its build, "digests": whether a manifest vouches for both}, and what is wrong.

    Inside a bundle the record is shown only where the manifest has its digest and the plan's; else it is None.
    """
    from speccompile.backends.tensorrt.records import read_record, record_file
    from speccompile.bundle.format import MANIFEST, check_files, read_json

    folder = next((f for f in path.resolve().parents if (f / MANIFEST).is_file()), None)
    if folder is None:
        return {"recorded": _record_beside(path), "digests": "not compared, as there is no manifest"}, None
    try:
        files = read_json(folder / MANIFEST).get("files", {})
        wanted = [f.resolve().relative_to(folder).as_posix() for f in (path, record_file(path))]
        missing = [name for name in wanted if name not in files]
        if missing:
            raise BundleError(str(folder / MANIFEST), f"no digest of {missing[0]}", "one", "Build the bundle again.")
        check_files(folder, {name: files[name] for name in wanted})
        return {"recorded": read_record(path), "digests": "hold"}, None
    except BundleError as fault:
        return {"recorded": None, "digests": "do not hold"}, fault


def _record_beside(path: Path) -> dict[str, Any]:
    from speccompile.backends.tensorrt.records import read_record, record_file

    if not record_file(path).is_file():
        expected = f"{record_file(path).name} beside it, the record of its build"
        todo = "Name the plan where it was built, in its bundle: the bytes of a plan alone are not read."
        raise BundleError(str(path), "a plan alone", expected, todo)
    record, size = read_record(path), path.stat().st_size
    if record.get("plan_bytes") != size:
        got, expected = f"{size} bytes", f"{record.get('plan_bytes')} bytes, as in the record beside it"
        raise BundleError(str(path), got, expected, "Name the plan where it was built.")
    return record


def print_plan(console: Console, plan: dict[str, Any]) -> None:
    """Prints what was recorded when the plan was built."""
    from speccompile.bundle.report import text_from_bytes

    recorded = plan["recorded"]
    if recorded is None:
        console.print(f"nothing recorded is shown: digests {plan['digests']}", style="dim")
        return
    layers = recorded.get("plugin_layers", {})
    rows = [("variant", f"{recorded['variant']} {recorded['version']}, {recorded['platform']}")]
    rows += [
        (
            f"profile {p['name']}",
            ", ".join(f"{dim} {low}/{best}/{high}" for dim, (low, best, high) in p["sizes"].items()),
        )
        for p in recorded["profiles"]
    ]
    stages = ", ".join(f"{s['name']} {s['seconds']:.2f} s" for s in recorded["build"]["stages"])
    rows += [
        ("GPUs", ", ".join(recorded["compute_capabilities"]) or "as the variant chose"),
        ("flags", ", ".join(recorded["flags"]) or "none"),
        ("plugins", ", ".join(f"{name} in {count} layers" for name, count in layers.items()) or "none"),
        ("plugin ABI", str(recorded["plugin_abi"]) if recorded["plugins"] else "no plugins"),
        ("weights", f"{text_from_bytes(recorded['lowered_weights_bytes'])} in the lowered graph"),
        ("build", f"{stages}, peak memory {text_from_bytes(recorded['build']['peak_rss_bytes'])}"),
    ]
    console.print(f"recorded at the build, digests {plan['digests']}", style="dim")
    table = Table("", "", box=None, show_header=False)
    for label, value in rows:
        table.add_row(Text(label), Text(value))
    console.print(table)
