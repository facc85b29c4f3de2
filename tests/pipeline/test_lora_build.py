# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter in a build: text, records, cache key, command line, and what is left of a refused one."""

import json
import shutil
from pathlib import Path

import pytest

from speccompile.bundle.graphs import find_graph
from speccompile.bundle.stage_cache import StageCache
from speccompile.cli.main import app
from speccompile.core import registry
from speccompile.errors import CheckpointError, RecipeError
from speccompile.pipeline import build
from speccompile.recipe.plan import BuildPlan
from tests import store
from tests.greedy_check import differing
from tests.pipeline import fakes

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

import speccompile  # noqa: E402
from speccompile import SamplingParams  # noqa: E402
from tests.checkpoints.lora_files import PREFIX, factors, write_adapter  # noqa: E402

PROMPTS = [[3, 5, 7, 5, 7], [4, 9]]
SHAPES = {f"model.layers.0.{name}": (64, 64) for name in ("self_attn.q_proj", "self_attn.o_proj")}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    fakes.make_checkpoint(tmp_path / "base", hidden=64, layers=1)
    write_adapter(tmp_path / "adapter", factors(SHAPES), target_modules=["q_proj", "o_proj"])
    engine = "{max_seq_len: 48, max_draft_nodes: 16, threads: 1}"
    target = "{model: base, lora: adapter}"
    path = tmp_path / "recipe.yaml"
    path.write_text(f"target: {target}\nspeculator: {{method: ngram}}\nengine: {engine}\n")
    return path


def twin(folder: Path) -> object:
    """Returns the base in transformers with W + 4 B A, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tensors = factors(SHAPES)
    with torch.no_grad():
        for name in SHAPES:
            a, b = (tensors[f"{PREFIX}{name}.lora_{side}.weight"] for side in "AB")
            model.get_submodule(name).weight += 4 * b @ a
    return model


def key(plan: BuildPlan) -> str:
    backend = registry.backend(plan.engine.backend, plan.engine.device)
    return find_graph(plan, plan.target, None, backend).key


def test_the_text_is_that_of_the_merged_model(recipe, tmp_path, capsys):
    plan = fakes.make_plan(recipe)
    with store.cheap_stages():
        bundle = build(plan, tmp_path / "out", cache=StageCache(tmp_path / "cache"))
    made = speccompile.load(bundle.path).generate(PROMPTS, SamplingParams(max_new_tokens=24, ignore_eos=True))
    texts = [one.tokens for one in made]
    assert [len(text) for text in texts] == [24, 24]
    assert differing(twin(tmp_path / "base"), PROMPTS, texts) == []
    with torch.no_grad():
        from transformers import AutoModelForCausalLM

        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
        assert differing(plain, PROMPTS, texts) == [0, 1]  # without the adapter the text is another one
    record = bundle.graphs["target"]["lora"]
    assert record["model"] == str(tmp_path / "adapter") and record["modules"] == 2 and record["ranks"] == [2]
    assert bundle.manifest["recipe"]["target"]["lora"] == str(tmp_path / "adapter")
    with pytest.raises(SystemExit):
        app(["inspect", str(bundle.path)])
    shown = capsys.readouterr().out
    assert "merged into 2 modules" in shown and record["sha256"]["adapter_model.safetensors"][:12] in shown
    # The certificate and the scripts of bench/ compare with the merged model, too.
    from bench.greedy_equality import gaps_of, open_target
    from bench.peers.distance import logits_of_transformers
    from speccompile.certificate.checkpoint import open_reference

    model, [logits] = open_target(bundle).target.model, logits_of_transformers(bundle, [[*PROMPTS[0], *texts[0]]])
    assert gaps_of(model, PROMPTS[0], texts[0]) == {}
    assert logits[len(PROMPTS[0]) - 1 : -1].argmax(axis=-1).tolist() == texts[0]

    reference, why = open_reference(tmp_path / "base", bundle.recipe.target.lora)
    assert reference is not None, why
    assert reference.greedy_beside(PROMPTS[0], texts[0]) == texts[0]


def test_a_draft_with_the_targets_adapter_drafts_as_the_target_writes(recipe, tmp_path):
    section = {"method": "draft_model", "model": str(tmp_path / "base"), "num_draft_tokens": 3}
    accepted = {}
    for lora in (str(tmp_path / "adapter"), None):
        plan = fakes.make_plan(recipe, f"speculator={json.dumps({**section, 'lora': lora})}")
        with store.cheap_stages():
            bundle = build(plan, tmp_path / f"out{lora is None}", cache=StageCache(tmp_path / "cache"))
        engine = speccompile.load(bundle.path)
        engine.controller = None
        made = engine.generate(PROMPTS, SamplingParams(max_new_tokens=24, ignore_eos=True))
        assert differing(twin(tmp_path / "base"), PROMPTS, [one.tokens for one in made]) == []
        accepted[lora] = [sum(one.stats[key] for one in made) for key in ("num_draft_tokens", "num_accepted")]
        assert bundle.graphs["draft"].get("lora", {}).get("model") == lora
        if lora is not None:  # the certificate's loop drafts with the merged weights, too
            from speccompile.certificate.acceptance import open_drafter
            from speccompile.certificate.checkpoint import open_reference

            reference, why = open_reference(tmp_path / "base", lora)
            assert reference is not None, why
            found, why = open_drafter(bundle, reference)
            assert found is not None, why
            state, merged = found[0].model.state_dict(), twin(tmp_path / "base").state_dict()  # type: ignore[attr-defined]
            assert all(torch.allclose(state[name], merged[name], atol=1e-6) for name in merged)
    (drafted, kept), (_, fewer) = accepted.values()
    assert drafted == kept > fewer


def test_the_key_has_the_adapters_contents(recipe, tmp_path):
    first, without = key(fakes.make_plan(recipe)), key(fakes.make_plan(recipe, "target.lora=null"))
    shutil.copytree(tmp_path / "adapter", tmp_path / "moved")
    assert key(fakes.make_plan(recipe, f"target.lora={tmp_path / 'moved'}")) == first != without
    write_adapter(tmp_path / "adapter", factors(SHAPES, seed=1), target_modules=["q_proj", "o_proj"])
    assert key(fakes.make_plan(recipe)) not in (first, without)


def test_a_refused_adapter_leaves_nothing(recipe, tmp_path):
    write_adapter(tmp_path / "adapter", factors({"model.layers.0.self_attn.q_proj": (64, 32)}))
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match=r"shape \[64, 32\]; expected shape \[64, 64\]"):
        build(fakes.make_plan(recipe), tmp_path / "out", cache=StageCache(None))
    assert {path.name for path in tmp_path.iterdir()} == before


def test_what_contradicts_an_adapter(recipe):
    with pytest.raises(RecipeError, match=r"target\.lora: got an adapter with target\.weights: random"):
        fakes.make_plan(recipe, "target.weights=random")
    section = f"{{method: draft_model, model: base, lora: {recipe.parent / 'adapter'}}}"
    with pytest.raises(RecipeError, match=r"speculator\.lora: got an adapter with target\.weights: random"):
        fakes.make_plan(recipe, f"speculator={section}", "target.lora=null", "target.weights=random")
    with pytest.raises(RecipeError, match=r"target\.lora\): got 'no-such'.*a hub id"):
        fakes.make_plan(recipe, "target.lora=no-such")


def test_the_command_line_names_one(recipe, tmp_path, capsys):
    sizes = ["--set", "engine.max_seq_len=48", "--set", "speculator={method: ngram}"]
    with pytest.raises(SystemExit):
        app(["build", str(tmp_path / "base"), "--lora", str(tmp_path / "adapter"), *sizes, "--dry-run", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["plan"]["target"]["lora"] == str(tmp_path / "adapter")
