# SPDX-License-Identifier: Apache-2.0
"""Bundles that the end-to-end tests share: built once a session, through the whole pipeline."""

import json
from pathlib import Path

import pytest

from speccompile.core import registry
from speccompile.core.jobs import MethodContext
from speccompile.runtime.spec_engine import SpecEngine
from tests import store
from tests.lab.graphs import compile_graph
from tests.method_rows import MAX_NODES, MAX_ROWS, MAX_SEQ, ROWS, config_of, method_of, quantization_of, sources

pytestmark = pytest.mark.export

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "examples/models"
SLOTS = 8  # of `lab`


def build_bundle(folder: Path, name: str, text: str, overrides: tuple[str, ...] = ()) -> Path:
    """Build a recipe given as YAML text; one cache for all workers and runs, so a graph is exported once.

    Measured times mean nothing here; see `tests.store.cheap_stages`.
    """
    from speccompile.pipeline import build
    from speccompile.recipe import find_device, load_recipe, resolve

    recipe = folder / f"{name}.yaml"
    recipe.write_text(text)
    plan = resolve(load_recipe(recipe, overrides), find_device("cpu"))
    with store.locked("build"), store.cheap_stages():
        return build(plan, folder / name, cache=store.stages()).path


def pair_recipe(quantization: str) -> str:
    """Returns recipes/pycode.yaml in its sizes, so that a build of that finds the graphs in the tests' cache."""
    return (
        f"target: {{model: {MODELS / 'pycode-16m'}, quantization: {quantization}}}\n"
        f"speculator: {{method: draft_model, model: {MODELS / 'pycode-16m-draft'}}}\n"
        "engine: {max_batch_size: 8, max_seq_len: 1024, threads: 1}\n"
    )


@pytest.fixture(scope="session")
def int8_pair(e2e_folder) -> Path:
    """Returns the example pair with an int8 target."""
    return build_bundle(e2e_folder, "int8_pair", pair_recipe("int8"))


@pytest.fixture(scope="session")
def golden() -> list[dict]:
    """Returns transformers' greedy fp32 output for examples/prompts.jsonl: see make_golden.py."""
    return json.loads((Path(__file__).parent / "golden/greedy.json").read_text())


@pytest.fixture(scope="module", autouse=True)
def _cheap(cheap_measurements: None) -> None:
    """No test here looks at measured times."""


@pytest.fixture(autouse=True)
def without_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets no clock decide whether to draft: on targets as small as these plain decoding is often faster."""
    monkeypatch.setattr("speccompile.runtime.spec_engine.controller_of", lambda proposer: None)


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """Returns (method, form, backend) -> SpecEngine; every graph is exported once and compiled once a backend."""
    pytest.importorskip("torch")
    pytest.importorskip("onnxruntime")
    from tests.speculators.eagle_lab import write_target

    folder = tmp_path_factory.mktemp("methods")
    write_target(folder / "target")
    models, engines, graphs = {}, {}, {}

    def engine_of(source, backend, target=None):
        key = (source.job, backend)
        if key not in engines:
            owners = {"target": engine_of(target, backend)} if source.spec().borrowed else {}
            # A decoder's graph is the same whatever its tail will be.
            graph = (source.job.model, source.job.source, str(getattr(source, "outputs", source.job.options)))
            if graph not in graphs:
                graphs[graph] = store.export(source)[0]
            maker, graph_folder = registry.backend(backend), folder / f"graph{len(engines)}"
            quantization = quantization_of(source, maker)
            spec, dims = source.spec(), source.dims if source.role == "target" else None
            built = compile_graph(graphs[graph], spec, graph_folder, maker, dims, quantization=quantization)
            engines[key] = built.open(SLOTS, max_rows=MAX_ROWS + spec.rows_written_ahead, owners=owners)
        return engines[key]

    def load(method, form, backend, costs=None):
        row = ROWS[method]
        if row.write is not None and method not in models:
            store.write_checkpoint(row.write, folder / method, folder / "target")
        models[method] = folder / method
        target, *rest = sources(method, form, folder / "target", models[method], keep_logits=True)
        drafts = {source.job.name: engine_of(source, backend, target) for source in rest}
        context = MethodContext(SLOTS, MAX_SEQ, MAX_NODES, dict.fromkeys(("target", *drafts), costs) if costs else {})
        proposer = method_of(method).make_proposer(config_of(method, form, models[method]), drafts, context)
        return SpecEngine(engine_of(target, backend), drafts, proposer, None, context)

    load.target = folder / "target"
    return load
