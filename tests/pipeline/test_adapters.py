# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters that requests choose: each text is that of a model with the adapter merged, in any batch."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import typer

from speccompile.bundle.graphs import find_graph
from speccompile.bundle.publish import card_from_manifest
from speccompile.bundle.stage_cache import StageCache
from speccompile.cli.main import app
from speccompile.cli.serve import with_adapters
from speccompile.core import registry
from speccompile.core.specs import ADAPTER, LENGTHS, LOGITS, TOKENS
from speccompile.errors import CheckpointError, RecipeError, RuntimeFault
from speccompile.passes.pipelines import PACKED
from speccompile.pipeline import build
from speccompile.recipe.model_recipe import ModelOptions
from speccompile.recipe.plan import BuildPlan
from tests import store
from tests.greedy_check import differing
from tests.pipeline import fakes

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

import speccompile  # noqa: E402
from speccompile import Request, SamplingParams  # noqa: E402
from speccompile.checkpoints.lora import open_lora  # noqa: E402
from speccompile.export.checks import check_target  # noqa: E402
from speccompile.export.lora import merge_lora  # noqa: E402
from speccompile.serving.openai.app import make_app  # noqa: E402
from speccompile.serving.openai.server import OpenAIServer, ServerOptions  # noqa: E402
from tests.checkpoints.lora_files import factors, write_adapter  # noqa: E402
from tests.serving.asgi_lab import get, post  # noqa: E402

PROMPTS = [[3, 5, 7, 5, 7], [4, 9], [3, 5, 7, 5, 7], [8, 6, 5]]
CHOSEN = ["", "queries", "all", "queries"]  # of the prompts
Q, V = "self_attn.q_proj", "self_attn.v_proj"
WHOLE = (Q, "self_attn.k_proj", V, "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def shapes(folder: Path, names: tuple[str, ...], layers: tuple[int, ...] = (0, 1)) -> dict[str, tuple[int, int]]:
    model = open_model(folder)
    held = {f"model.layers.{layer}.{name}": None for layer in layers for name in names}
    return {name: tuple(model.get_submodule(name).weight.shape) for name in held}


def open_model(folder: Path, *adapters: Path) -> Any:
    """Returns the model in transformers with adapters merged, float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for adapter in adapters:
        merge_lora(model, open_lora(str(adapter)))
    return model


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, two adapters of other ranks, modules and scalings, and their recipe."""
    home = tmp_path_factory.mktemp("adapters")
    fakes.make_checkpoint(home / "base", hidden=64, layers=2)
    few, whole = shapes(home / "base", (Q, V), (1,)), shapes(home / "base", WHOLE)
    write_adapter(
        home / "queries", factors(few, rank=2, seed=1), target_modules=["q_proj", "v_proj"], layers_to_transform=[1]
    )
    tensors = factors(whole, rank=3, seed=2) | factors({f"model.layers.0.{Q}": (64, 64)}, rank=5, seed=3)
    patterns: dict[str, Any] = {"rank_pattern": {r"layers.0.self_attn.q_proj": 5}, "alpha_pattern": {"o_proj": 2}}
    endings = [name.rpartition(".")[2] for name in WHOLE]
    write_adapter(home / "all", tensors, r=3, lora_alpha=1, use_rslora=True, target_modules=endings, **patterns)
    adapters = "{queries: queries, all: all}"
    engine = "{max_seq_len: 64, max_draft_nodes: 15, max_batch_size: 4, threads: 1, logits: true}"
    text = f"target: {{model: base, adapters: {adapters}}}\nspeculator: {{method: ngram}}\nengine: {engine}\n"
    (home / "recipe.yaml").write_text(text)
    return home


@pytest.fixture(scope="module", params=["none", "int8"])
def bundle(home: Path, request: pytest.FixtureRequest) -> Any:
    plan = fakes.make_plan(home / "recipe.yaml", f"target.quantization={request.param}")
    with store.cheap_stages():
        return build(plan, home / f"out-{request.param}", cache=StageCache(home / "cache"))


def test_the_check_of_a_build_chooses_an_adapter(bundle, monkeypatch):
    target = speccompile.load(bundle.path).verifier.engine
    fed, run = [], target.run
    monkeypatch.setattr(target, "run", lambda feeds: fed.append(feeds.get(ADAPTER)) or run(feeds))
    assert check_target(target, 4)["num_equal"] >= 1
    assert fed == [1] * 5


def test_verify_compares_each_adapter_with_its_merged_model(home, bundle):
    """And a wrong adapter's texts fail where the weights are exact."""
    from speccompile.certificate import verify

    options = verify.Options(PROMPTS[:2], 12, checkpoint=home / "base")
    engine = speccompile.load(bundle.path)
    engine.controller = None
    check = verify.STEPS["reference"](verify.Subject(engine, engine.bundle, options))
    rows = check.facts["adapters"]
    exact = bundle.manifest["recipe"]["target"]["quantization"] == "none"
    assert check.status == "passed" and list(rows) == ["all", "queries"] and check.facts["is_exact"] == exact
    assert not exact or [row["num_equal"] for row in (check.facts, *rows.values())] == [2, 2, 2]
    assert "adapter queries: " in check.summary
    swapped = {"all": str(home / "queries"), "queries": str(home / "all")}
    subject = verify.Subject(engine, engine.bundle, options)
    subject.bundle = SimpleNamespace(
        manifest=bundle.manifest,
        recipe=SimpleNamespace(target=bundle.recipe.target.model_copy(update={"adapters": swapped})),
    )
    assert verify.STEPS["reference"](subject).status == ("failed" if exact else "passed")
    subject.bundle.recipe.target = bundle.recipe.target.model_copy(update={"adapters": {"all": "/nowhere"}})
    gone = verify.STEPS["reference"](subject)
    assert gone.status == "not run" and "adapter all: " in gone.summary


def sampling(adapter: str, **fields: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=24, ignore_eos=True, adapter=adapter, **fields)


def test_each_text_is_that_of_its_merged_model(home, bundle):
    assert bundle.adapters == ("all", "queries")
    engine = speccompile.load(bundle.path)
    params = [sampling(name) for name in CHOSEN]
    texts = [one.tokens for one in engine.generate(PROMPTS, params)]
    assert [one.tokens for one in engine.generate(PROMPTS, params, speculative=False, batch_size=1)] == texts
    assert texts[0] != texts[2]
    if bundle.manifest["recipe"]["target"]["quantization"] == "none":
        for prompt, name, text in zip(PROMPTS, CHOSEN, texts, strict=True):
            model = open_model(home / "base", *([home / name] if name else []))
            assert differing(model, [prompt], [text]) == []
    with pytest.raises(RuntimeFault, match=r"prompt 0 \(adapter\): got 'other'; expected one of all, queries"):
        engine.generate(PROMPTS[:1], sampling("other"))


@pytest.mark.parametrize("bundle", ["none"], indirect=True)
@pytest.mark.parametrize("method", ["self_draft", "early_exit"])
def test_a_drafter_of_the_targets_own_weights_has_no_adapter_and_changes_no_text(home, bundle, method):
    """They run layers of the target, the second on its caches."""
    layers = {"num_exit_layers": 1} if method == "early_exit" else {}
    section = json.dumps({"method": method, "num_draft_tokens": 3, **layers})
    plan = fakes.make_plan(home / "recipe.yaml", f"speculator={section}", "target.quantization=none")
    with store.cheap_stages():
        made = build(plan, home / f"out-{method}", cache=StageCache(home / "cache"))
    assert ADAPTER not in [tensor.name for tensor in made.graph_spec(list(made.graphs)[1]).inputs]
    params = [sampling(name) for name in CHOSEN]
    wanted = [one.tokens for one in speccompile.load(bundle.path).generate(PROMPTS, params)]
    engine = speccompile.load(made.path)
    engine.controller = None
    found = engine.generate(PROMPTS, params)
    assert [one.tokens for one in found] == wanted
    assert all(one.stats["num_draft_tokens"] > 0 for one in found)


def test_chains_have_the_bits_of_single_steps(bundle):
    """And a slot's rows are those that it has alone, whatever the adapters of others are."""
    target = speccompile.load(bundle.path).verifier.engine
    tokens, chosen = np.array([[3, 5, 7, 9, 4], [8, 6, 5, 4, 7], [3, 5, 7, 9, 4]]), np.array([2, 1, 0])
    chain = np.array(target.run({TOKENS: tokens, ADAPTER: chosen, LENGTHS: np.zeros(3, np.int64)})[LOGITS])
    assert not np.allclose(chain[0], chain[2], atol=1e-3)
    for slot, number in enumerate(chosen):
        for node in range(5):
            feeds = {TOKENS: tokens[slot : slot + 1, node : node + 1], ADAPTER: np.array([number])}
            single = target.run({**feeds, LENGTHS: np.array([node])}, first_slot=slot)[LOGITS]
            assert np.array_equal(np.asarray(single)[0, 0], chain[slot, node])


def test_a_kept_cache_is_that_of_one_adapter(home, bundle):
    long = [3 + i % 20 for i in range(40)]
    with speccompile.load_service(bundle.path) as service:
        import asyncio

        def ask(name: str) -> Any:
            return asyncio.run(service.generate(Request(long, sampling(name))))[0]

        found = {name: ask(name) for name in ("", "all")}
        assert [one.stats["num_reused_tokens"] for one in found.values()] == [0, 0]
        again = ask("all")
        assert again.stats["num_reused_tokens"] > 0 and again.tokens == found["all"].tokens != found[""].tokens


def test_the_apis_choose_one_as_the_model(bundle):
    params = [sampling(name) for name in ("", "all")]
    texts = [one.text for one in speccompile.load(bundle.path).generate([PROMPTS[0]] * 2, params)]
    with speccompile.load_service(bundle.path) as service:
        served = make_app(OpenAIServer(service, ServerOptions("base")))
        ids = [(row["id"], row.get("parent")) for row in get(served, "/v1/models").json()["data"]]
        assert ids == [("base", None), ("all", "base"), ("queries", "base")]
        for name, text in zip(("base", "all"), texts, strict=True):
            body = {"model": name, "prompt": PROMPTS[0], "max_tokens": 24, "ignore_eos": True}
            answer = post(served, "/v1/completions", body).json()
            assert (answer["model"], answer["choices"][0]["text"]) == (name, text)
        refused = post(served, "/v1/completions", {"model": "other", "prompt": [3]})
        assert refused.status == 404 and "`base`, `all`, `queries` is" in refused.json()["error"]["message"]
        with pytest.raises(RuntimeFault, match="served model: got 'all', an adapter's name too; expected a name"):
            OpenAIServer(service, ServerOptions("all"))


def test_records_and_keys(home, bundle, capsys):
    with pytest.raises(SystemExit):
        app(["inspect", str(bundle.path)])
    shown = " ".join(capsys.readouterr().out.split())
    assert "'all' for 14 modules" in shown and "'queries' for 2 modules" in shown
    assert "all (rank 5), queries (rank 2)" in card_from_manifest(bundle.manifest, "someone/bundle")
    rows = bundle.graphs["target"]["adapters"]
    assert [(row["name"], row["ranks"], row["modules"]) for row in rows] == [("all", [3, 5], 14), ("queries", [2], 2)]
    assert bundle.manifest["recipe"]["target"]["adapters"]["all"] == str(home / "all")
    assert ADAPTER in [tensor.name for tensor in bundle.graph_spec("target").inputs]
    histogram = bundle.graphs["target"]["op_histogram"]["after"]
    plain, gated = (histogram.get(f"speccompile::{name}", 0) for name in ("LowRank", "GatedLowRank"))
    assert plain + gated == 2 * 4  # QKV and gate-and-up are merged
    if bundle.graphs["target"]["form"].endswith(PACKED):
        assert (gated, histogram["speccompile::AddNorm"]) == (2, 3)
        assert not any(name in histogram for name in ("Split", "Sigmoid"))
    plans = [
        fakes.make_plan(home / "recipe.yaml", f"target.adapters={{all: {home / name}}}") for name in ("all", "queries")
    ]
    assert len({key(plan) for plan in (*plans, fakes.make_plan(home / "recipe.yaml", "target.adapters={}"))}) == 3


def test_a_dry_run_tells_the_adapters_bytes(home, bundle, capsys):
    """As the graph has them in float32: of merged linears each part has ranks of its own."""
    import onnx

    with pytest.raises(SystemExit):
        app(["build", str(home / "recipe.yaml"), "--dry-run", "--json"])
    told = json.loads(capsys.readouterr().out)["predicted"]["graphs"]["target"]
    graph = onnx.load(next(bundle.path.glob("**/target/**/graph.onnx")), load_external_data=False).graph
    factors = {n for node in graph.node if node.op_type.endswith("LowRank") for n in node.input[3:]}
    held = sum(4 * int(np.prod(t.dims)) for t in graph.initializer if t.name in factors)
    assert told["adapter_bytes"] == held > 0
    assert told["least_file_bytes"] > held


def test_serve_builds_with_the_adapters_of_its_options(home):
    model = with_adapters(
        ModelOptions(settings=("engine.threads=1",)), [f"a.b={home / 'all'}", f"c={home / 'queries'}"]
    )
    plan = fakes.make_plan(home / "recipe.yaml", *model.settings)
    assert dict(plan.target.adapters) == {"a.b": str(home / "all"), "c": str(home / "queries")}
    assert with_adapters(model, []) == model
    for given in (["all"], ["=all"], ["a="], ["a=b", "a=c"]):
        with pytest.raises(typer.BadParameter, match="expected NAME=PATH"):
            with_adapters(model, given)


def key(plan: BuildPlan) -> str:
    return find_graph(plan, plan.target, None, registry.backend(plan.engine.backend, plan.engine.device)).key


def test_what_is_more_than_a_low_rank_change_is_refused(home, tmp_path):
    shape = {f"model.layers.0.{Q}": (64, 64)}
    base = {"target_modules": ["q_proj"], "layers_to_transform": [0]}
    stem = f"base_model.model.model.layers.0.{Q}"
    head = {"base_model.model.lm_head.weight": torch.zeros(32, 64)}
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {"fan_in_fan_out": True}, r"fan_in_fan_out\): got true"),
        (head, {"modules_to_save": ["lm_head"]}, r"lm_head.weight\): got a whole parameter"),
        ({f"{stem}.lora_magnitude_vector": torch.ones(64)}, {"use_dora": True}, "got DoRA"),
        ({f"{stem}.lora_B.bias": torch.ones(64)}, {"lora_bias": True}, "got lora_bias"),
        (factors({"lm_head": (32, 64)}), {}, r"\(lm_head.weight\): got a change of a table"),
    ]
    for number, (more, config, message) in enumerate(cases):
        folder = write_adapter(tmp_path / str(number), factors(shape) | more, **base, **config)
        plan = fakes.make_plan(home / "recipe.yaml", f"target.adapters={json.dumps({'one': str(folder)})}")
        with pytest.raises(CheckpointError, match=message):
            build(plan, tmp_path / "out", cache=StageCache(None))
    with pytest.raises(RecipeError, match=r"target\.adapters: got an adapter with target\.weights: random"):
        fakes.make_plan(home / "recipe.yaml", "target.weights=random")
