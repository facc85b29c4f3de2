# SPDX-License-Identifier: Apache-2.0
"""The cache key of a compiled graph holds all sources that can change the graph, and no decode-time ones."""

import dataclasses
from pathlib import Path

import grimp
import pytest

from speccompile.bundle import format as digests
from speccompile.bundle import graphs
from speccompile.bundle.format import digest_from_json, digest_from_package, digest_from_sources, json_from_options
from speccompile.core import registry
from tests.method_rows import ROWS, config_of, method_of

PACKAGE = "speccompile"
# Imported by exports and lowering, yet nothing of a graph depends on them: errors and readers of documents, look-up
# tables, protocols, what tries a compiled graph, and the numpy twins of ops with what they compute with.
NEUTRAL = {
    f"{PACKAGE}.{name}"
    for name in (
        *("common.cache_root", "common.disk", "common.extras", "common.json_reader", "common.tokenizer_file", "errors"),
        *("core.acceptance", "core.registry", "core.sampling", "core.tree", "common.parameters", "core.probes"),
        *("core.sampling_params", "common.waiting"),
    )
}


@pytest.fixture(scope="module")
def imports() -> grimp.ImportGraph:
    return grimp.build_graph(PACKAGE, exclude_type_checking_imports=True, cache_dir=None)


def is_covered(module: str, sources: tuple[str, ...]) -> bool:
    path = module.removeprefix(f"{PACKAGE}.").replace(".", "/")
    return any(path == source or path.startswith(f"{source}/") for source in sources)


def test_what_exports_and_passes_import_is_in_the_key(imports: grimp.ImportGraph) -> None:
    for package in ("export", "passes", "ops"):
        roots = [m for m in imports.modules if m.startswith(f"{PACKAGE}.{package}.")]
        needed = set(roots).union(*(imports.find_upstream_modules(m) for m in roots)) - NEUTRAL - {PACKAGE}
        missing = sorted(m for m in needed if imports.find_children(m) == set() and not is_covered(m, graphs.SOURCES))
        assert missing == []


@pytest.mark.parametrize("name", sorted(registry.BACKENDS))
def test_the_sources_of_a_backend_exist_and_run_nothing(name: str) -> None:
    root = Path(digests.__file__).parents[1]
    sources = registry.backend(name).graph_sources
    assert sources and all((root / source).with_suffix(".py").is_file() for source in sources)
    assert not any(source.endswith(("engine", "loading", "runner", "buffers")) for source in sources)


def test_a_decode_time_policy_leaves_the_key_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(digests, "digest_from_file", lambda file: seen.append(file.as_posix()) or "0")
    digest_from_sources((*graphs.SOURCES, *registry.backend("onnxruntime").graph_sources))
    digest_from_package("speccompile.speculators.mlp.checkpoint", leave_out=graphs.NOT_OF_GRAPHS)
    folders = {Path(file).parent.name for file in seen}
    assert {"ops", "passes", "export", "mlp"} <= folders and not {"drafting", "runtime", "cuda"} & folders
    names = {Path(file).stem for file in seen if "/mlp/" in file}
    assert {"checkpoint", "model"} <= names and not names & set(graphs.NOT_OF_GRAPHS)


@pytest.mark.parametrize("name", sorted(ROWS))
@pytest.mark.parametrize("form", ["chain", "tree"])
def test_a_recipe_field_of_decoding_alone_leaves_the_key_as_it_is(name: str, form: str) -> None:
    if form == "tree" and ROWS[name].tree is None:
        return
    method, config = method_of(name), config_of(name, form, Path("model"))
    other = {"confidence_odds": 3.0, "min_confidence": 0.5, "tokens_per_match": 3}
    if form == "chain":
        other["tree_depth"] = 4
    known = {field.name for field in dataclasses.fields(config)}
    if "drafters" in known:  # its graphs are theirs
        return
    changed = dataclasses.replace(config, **{key: value for key, value in other.items() if key in known})
    assert config != changed
    keys = [[digest_from_json({"options": job.options}) for job in method.graph_jobs(c)] for c in (config, changed)]
    assert keys[0] == keys[1]
    jobs = [[dataclasses.replace(job, options=None) for job in method.graph_jobs(c)] for c in (config, changed)]
    assert jobs[0] == jobs[1]


def test_what_only_checks_a_graph_is_no_part_of_its_key() -> None:
    method = registry.method("medusa")
    config = dataclasses.replace(config_of("medusa", "tree", Path("model")), num_heads=4)
    shapes = ([[0], [0, 0]], [[0], [0, 0], [0, 0, 0]])
    options = [method.graph_jobs(dataclasses.replace(config, tree=tree))[0].options for tree in shapes]
    assert [o.least_heads for o in options] == [2, 3] and options[0] == options[1]
    assert json_from_options(options[0]) == {"num_heads": 4, "num_candidates": 1}
