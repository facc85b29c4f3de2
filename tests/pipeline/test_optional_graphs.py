# SPDX-License-Identifier: Apache-2.0
"""A graph that only some checkpoints of a method have is built for these alone, and decoding finds it."""

from pathlib import Path

import pytest

from speccompile.bundle.graphs import find_graph, needed_jobs
from speccompile.bundle.stage_cache import StageCache
from speccompile.core import registry
from speccompile.pipeline import build
from speccompile.prepare import key_of
from tests import store
from tests.pipeline import fakes

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

import speccompile  # noqa: E402
from speccompile import SamplingParams  # noqa: E402
from tests.speculators import dflash_lab, eagle_lab  # noqa: E402


def recipe_of(folder: Path, draft: str) -> Path:
    speculator = f"{{method: dflash, model: {draft}, tree: chain, num_draft_tokens: 4}}"
    engine = "{max_seq_len: 64, max_draft_nodes: 8, threads: 1, max_batch_size: 2}"
    path = folder / f"{draft}.yaml"
    path.write_text(f"target: {{model: target}}\nspeculator: {speculator}\nengine: {engine}\n")
    return path


def test_the_step_of_a_drafter_is_built_where_it_has_one(tmp_path):
    eagle_lab.write_target(tmp_path / "target")
    dflash_lab.write_learnt_path(tmp_path / "path", tmp_path / "target")
    dflash_lab.write(tmp_path / "one", dflash_lab.KINDS["one"])
    backend, names = registry.backend("onnxruntime"), {}
    for draft in ("one", "path"):
        plan = fakes.make_plan(recipe_of(tmp_path, draft))
        target = find_graph(plan, plan.target, None, backend)
        names[draft] = [job.name for job in needed_jobs(plan, target.dims)]
        assert len(key_of(plan)) == 64
    assert names == {"one": ["draft", "fusion"], "path": ["draft", "fusion", "step"]}
    with store.cheap_stages():
        bundle = build(plan, tmp_path / "out", cache=StageCache(tmp_path / "cache"))
    assert [name for name in bundle.graphs if name != "rollback"] == ["target", "draft", "fusion", "step"]
    assert bundle.graphs["step"]["checks"] == {"num_tokens": 2}
    engine = speccompile.load(bundle.path)
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    texts = engine.generate(eagle_lab.PROMPTS[:2], params)
    plain = engine.generate(eagle_lab.PROMPTS[:2], params, speculative=False)
    assert [one.tokens for one in texts] == [one.tokens for one in plain]
    assert sum(one.stats["num_accepted"] for one in texts) > 5
