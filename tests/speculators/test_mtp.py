# SPDX-License-Identifier: Apache-2.0
"""Graphs of multi-token prediction modules against transformers' own, in every layout; what is refused."""

import json
import shutil

import numpy as np
import onnx
import pytest

from speccompile.checkpoints.checkpoint import check_checkpoint, read_dims
from speccompile.core.jobs import AS_TARGET, GraphJob, SourceContext
from speccompile.core.specs import CANDIDATES, FEATURE_NODES, FEATURES, LENGTHS, NEXT_FEATURES, SCORED_NODES, TOKENS
from speccompile.errors import CheckpointError, ExportError, RecipeError
from speccompile.graph_kinds.decoder import DraftVocab

torch = pytest.importorskip("torch")

from speccompile.speculators.mtp.checkpoint import DraftSource  # noqa: E402
from speccompile.speculators.mtp.config import MtpConfig, MtpOptions  # noqa: E402
from tests.pipeline import fakes  # noqa: E402
from tests.speculators import mtp_lab as lab  # noqa: E402
from tests.speculators.eagle_lab import compiled  # noqa: E402

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
TOLERANCE = 1e-5  # of the largest number: float32 sums in another order differ by about 1e-6, a chain adds them up
# Where a module of each architecture is stored.
LAYOUTS = {
    "llama": "alone", "qwen3": "speculators", "qwen3_moe": "inside", "glm4_moe": "numbered",
    "qwen3_5_text": "inside", "qwen3_next": "inside", "deepseek_v3": "numbered", "glm4_moe_lite": "numbered",
}  # fmt: skip


def source_of(target, model, weights="checkpoint", **options):
    job = GraphJob("draft", str(model), options=MtpOptions(2, False, **options))
    return DraftSource(job, SourceContext(weights, 64, 6, read_dims(target), GraphJob("target", str(target))))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Returns family -> (target's folder, module's folder, module)."""
    folder, held = tmp_path_factory.mktemp("modules"), {}

    def make(family):
        if family not in held:
            target = lab.write_target(folder / family, family)
            config, module = lab.random_module(target)
            layout, module_folder = LAYOUTS[family], folder / f"{family}-module"
            if layout == "alone":
                lab.write_alone(module_folder, config, module)
            elif layout == "speculators":
                lab.write_speculators(module_folder, target, module)
            else:
                module_folder = lab.add_to_target(target, module, numbered=layout == "numbered")
            held[family] = (target, module_folder, module)
        return held[family]

    return make


def run(engine, tokens, length, features, rows, scored):
    """Runs one slot; returns own states [1 + nodes, hidden] and the best token after node `scored`."""
    feeds = {TOKENS: np.array([tokens]), LENGTHS: np.array([length]), FEATURES: np.asarray(features, np.float32)}
    outputs = engine.run({**feeds, FEATURE_NODES: np.array([rows]), SCORED_NODES: np.array([[scored]])})
    return np.asarray(outputs[NEXT_FEATURES])[0].copy(), int(np.asarray(outputs[CANDIDATES])[0, 0, 0])


def save_words(path, num):
    """Writes a tokenizer of words."""
    path.write_text(json.dumps(fakes.tokenizer(num)))


def assert_close(got, wanted):
    wanted = wanted.numpy()
    assert np.abs(got - wanted).max() <= TOLERANCE * np.abs(wanted).max()


@pytest.mark.parametrize("family", LAYOUTS)
def test_a_graph_is_transformers_own_module(family, made, tmp_path):
    """A prompt in two chunks, a chain on own states, and a second text after one of three drafts was accepted."""
    target, model, module = made(family)
    oracle = lab.Oracle(target, module)
    source = source_of(target, model, chaining="normed")  # as transformers carries on, DeepSeek's chains too
    source.check()
    for engine in compiled(source, tmp_path, *(("onnxruntime", "reference") if family == "llama" else ())):
        hidden, cache = oracle.hidden(TEXT[:-1]), oracle.begin()
        first, _ = run(engine, TEXT[1:5], 0, hidden[:, :4], range(4), 0)
        rest, token = run(engine, TEXT[5:], 4, hidden, range(4, 10), 5)
        own = oracle.read(TEXT[1:], hidden, cache, 0)
        assert_close(np.concatenate((first[1:], rest[1:])), own[0])
        held, state, chain = rest, own[:, -1:], [token]
        for step in range(2):
            assert chain[-1] == int(oracle.logits(state).argmax())
            state = oracle.read(chain[-1:], state, cache, 10 + step)
            held, token = run(engine, chain[-1:], 10 + step, held[None], [len(held) - 1], 0)
            assert_close(held[1:], state[0])
            chain.append(token)
        assert chain == oracle.drafts(TEXT, 3)
        # The first draft was accepted: its row is read again with the target's state, and the later one is dropped.
        longer = [*TEXT, chain[0], (chain[1] + 1) % 40]
        hidden = oracle.hidden(longer[:-1])
        held, token = run(engine, longer[-2:], 10, hidden, [10, 11], 1)
        fresh = oracle.read(longer[1:], hidden, oracle.begin(), 0)
        assert_close(held[1:], fresh[0, 10:])
        assert token == int(oracle.logits(fresh[:, -1:]).argmax())
    lowered = onnx.load(tmp_path / "onnxruntime/draft/graph.onnx", load_external_data=False)
    assert {"Cos", "Sin"}.isdisjoint(node.op_type for node in lowered.graph.node), "angles have no half-precision form"


@pytest.mark.parametrize("family", ["qwen3_5_text", "glm4_moe"])
def test_transformers_reads_the_same_module_out_of_the_targets_files(family, made):
    target, _, module = made(family)
    assert lab.Oracle(target).drafts(TEXT, 4) == lab.Oracle(target, module).drafts(TEXT, 4)


@pytest.mark.parametrize(
    ("fields", "changed"),
    [({"concat": "hidden_first"}, True), ({"norms": "1+w"}, True), ({"chaining": "raw"}, True), ({}, False)],
)
def test_every_convention_changes_the_numbers(fields, changed, made, tmp_path):
    target, model, module = made("llama")
    oracle = lab.Oracle(target, module)
    (engine,) = compiled(source_of(target, model, **fields), tmp_path)
    held, _ = run(engine, TEXT[1:], 0, oracle.hidden(TEXT[:-1]), range(10), 9)
    own = oracle.read(TEXT[1:], oracle.hidden(TEXT[:-1]), oracle.begin(), 0)[0].numpy()
    assert (np.abs(held[1:] - own).max() > 0.1) == changed


def test_a_raw_chain_drafts_the_same_first_token_from_the_same_state(made, tmp_path):
    """The head reads the normed state either way; what is carried on differs, and so do later drafts."""
    target, model, module = made("llama")
    hidden, found = lab.Oracle(target, module).hidden(TEXT[:-1]), {}
    for chaining, fields in (("normed", {}), ("raw", {"chaining": "raw"})):
        (engine,) = compiled(source_of(target, model, **fields), tmp_path / chaining)
        held, token = run(engine, TEXT[1:], 0, hidden, range(10), 9)
        found[chaining] = (token, run(engine, [token], 10, held[None], [10], 0)[0][1])
    assert found["normed"][0] == found["raw"][0]
    assert np.abs(found["normed"][1] - found["raw"][1]).max() > 0.01


def test_a_module_with_a_part_of_the_vocabulary_drafts_the_likeliest_of_these_tokens(made, tmp_path):
    target, model, module = made("llama")
    save_words(target / "tokenizer.json", 40)
    (tmp_path / "text.txt").write_text("w7 w8 w9 w11 w30 " * 300)
    oracle = lab.Oracle(target, module)
    source = source_of(target, model, vocab=DraftVocab(5, str(tmp_path / "text.txt")))
    kept = list(source.draft_tokens.ids)
    assert len(kept) == 5 and {7, 8, 9} <= set(kept)
    (engine,) = compiled(source, tmp_path)
    hidden = oracle.hidden(TEXT[:-1])
    _, token = run(engine, TEXT[1:], 0, hidden, range(10), 9)
    logits = oracle.logits(oracle.read(TEXT[1:], hidden, oracle.begin(), 0)[:, -1:]).flatten()
    assert token == kept[int(logits[kept].argmax())] != int(logits.argmax())
    assert source.digests()["draft_vocab"] == source.draft_tokens.digest
    assert "draft_vocab" not in source_of(target, model).digests()


def test_norms_stored_in_the_other_form_compute_the_same(made, tmp_path):
    """Weights of 1 + w that were stored as plain ones, as some conversions have them."""
    target, _, module = made("qwen3_5_text")
    config, other = lab.random_module(target, norms="w")
    other.load_state_dict({n: t + ("norm" in n) for n, t in module.state_dict().items()})
    module_folder = lab.write_alone(tmp_path / "plain", config, other)
    hidden = lab.Oracle(target, module).hidden(TEXT[:-1])
    states = []
    for model in (target, module_folder):
        (engine,) = compiled(source_of(target, model), tmp_path / model.name)
        states.append(run(engine, TEXT[1:], 0, hidden, range(10), 9)[0][1:])
    assert np.abs(states[0] - states[1]).max() < 1e-5


def test_a_target_with_a_module_inside_is_whole_without_it(made):
    for family in ("qwen3_moe", "glm4_moe"):
        target, _, _ = made(family)
        check_checkpoint(target, read_dims(target))


def test_a_layer_too_many_is_still_refused(made, tmp_path):
    """A layer after the last one that projects no hidden state is no module."""
    shutil.copytree(made("glm4_moe")[0], tmp_path / "target")
    held = lab.load_file(tmp_path / "target/model.safetensors")
    del held["model.layers.2.eh_proj.weight"]
    lab.save(tmp_path / "target", held)
    with pytest.raises(CheckpointError, match="weights of layer 2"):
        check_checkpoint(tmp_path / "target", read_dims(tmp_path / "target"))


def changed(folder, module_folder, change, **config):
    """Returns a copy of a folder with changed weights and config."""
    shutil.copytree(folder, module_folder)
    held = lab.load_file(module_folder / "model.safetensors")
    change(held)
    lab.save(module_folder, held)
    stated = json.loads((module_folder / "config.json").read_text())
    (module_folder / "config.json").write_text(json.dumps({**stated, **config}))
    return module_folder


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("glm4_moe", lambda h: h.pop("model.layers.2.enorm.weight"), r"2.enorm.weight\): got no such key"),
        ("glm4_moe", lambda h: h.update({"model.layers.2.extra.weight": torch.ones(2)}), "extra.weight.*does not have"),
        ("glm4_moe", lambda h: h.pop("model.layers.2.mlp.experts.2.up_proj.weight"), "got no such key"),
        ("deepseek_v3", lambda h: h.pop("model.layers.3.self_attn.kv_b_proj.weight"), "kv_b_proj.*got no such key"),
        ("deepseek_v3", lambda h: h.pop("model.layers.3.self_attn.q_a_layernorm.weight"), "q_a_layernorm.*got no such"),
        ("qwen3_5_text", lambda h: h.update({"mtp.fc.weight": torch.ones(32, 32)}), r"mtp.fc.weight\): got \[32, 32\]"),
        ("qwen3_5_text", lambda h: h.pop("mtp.layers.0.self_attn.q_norm.weight"), "q_norm.weight"),
        (
            "qwen3_5_text",
            lambda h: h.update({"mtp.layers.0.self_attn.q_proj.weight": torch.ones(32, 32)}),
            "32 rows; expected 64 rows: queries and their gates",
        ),
        (
            "qwen3_5_text",
            lambda h: [h.pop(f"mtp.layers.0.self_attn.{p}_norm.weight") for p in "qk"],
            "no q_norm and k_norm",
        ),
    ],
)  # fmt: skip
def test_weights_that_are_not_the_modules_are_refused(family, change, words, made, tmp_path):
    target, model, _ = made(family)
    with pytest.raises(CheckpointError, match=words) as caught:
        source_of(target, changed(model, tmp_path / "model", change)).check()
    assert caught.value.expected and caught.value.todo


def test_biases_that_the_architecture_has_are_asked_for(made, tmp_path):
    target, model, _ = made("glm4_moe")
    stem = "model.layers.2.self_attn"
    module_folder = changed(model, tmp_path / "model", lambda held: [held.pop(f"{stem}.{p}_proj.bias") for p in "qkv"])
    with pytest.raises(CheckpointError, match=r"k_proj\.bias missing"):
        source_of(target, module_folder).export(lambda stage: None)


def test_more_modules_than_one_are_refused(made, tmp_path):
    target, model, _ = made("qwen3_5_text")
    with pytest.raises(CheckpointError, match="2 modules"):
        source_of(target, changed(model, tmp_path / "model", lambda held: None, mtp_num_hidden_layers=2)).check()


def test_latent_attention_of_other_types_is_refused_by_name(made, tmp_path):
    target, model, _ = made("glm4_moe")
    module_folder = changed(model, tmp_path / "model", lambda held: None, model_type="longcat_flash", kv_lora_rank=16)
    with pytest.raises(ExportError, match="multi-head latent attention"):
        source_of(target, module_folder)


@torch.no_grad()
def block_states(module, embedded, hidden):
    """Returns the states of a module of two blocks after a whole text, by Nemotron-H's own mixers."""
    parts = (module.pre_fc_norm_embedding(embedded), module.pre_fc_norm_hidden(hidden))
    x = module.fc(torch.cat(parts, -1))
    first, second = module.layers
    x = x + first.mixer(first.norm(x))[0]
    return module.norm(x + second.mixer(second.norm(x)))


def test_a_module_of_two_blocks(tmp_path):
    """Attention without rotation, then experts: a prompt in two chunks, and a draft on an own state."""
    target = lab.write_target(tmp_path / "target", "nemotron_h")
    _, module = lab.random_module(target)
    lab.add_to_target(target, module)
    model = lab.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    source = source_of(target, target)
    source.check()
    (engine,) = compiled(source, tmp_path)
    ids = torch.tensor([TEXT])
    with torch.no_grad():
        embedded, hidden = model.get_input_embeddings()(ids), model.get_decoder()(input_ids=ids).last_hidden_state
    wanted = block_states(module, embedded[:, 1:], hidden[:, :-1])
    first, _ = run(engine, TEXT[1:5], 0, hidden[:, :4], range(4), 0)
    rest, token = run(engine, TEXT[5:], 4, hidden, range(4, 10), 5)
    assert_close(np.concatenate((first[1:], rest[1:])), wanted[0])
    with torch.no_grad():
        assert token == int(model.lm_head(wanted[:, -1:]).argmax())
        longer = torch.cat((embedded[:, 1:], model.get_input_embeddings()(torch.tensor([[token]]))), 1)
    held, _ = run(engine, [token], 10, rest[None], [len(rest) - 1], 0)
    chained = block_states(module, longer, torch.cat((hidden[:, :-1], wanted[:, -1:]), 1))
    assert_close(held[1:], chained[0, -1:])


@pytest.mark.parametrize(
    "blocks", [{"mtp_layers_block_type": ["moe", "attention"]}, {"mtp_hybrid_override_pattern": "*"}]
)
def test_a_module_of_other_blocks_is_refused_by_name(blocks, made, tmp_path):
    target, model, _ = made("glm4_moe")
    module_folder = changed(model, tmp_path / "model", lambda held: None, model_type="nemotron_h", **blocks)
    with pytest.raises(ExportError, match="a module of nemotron_h: got blocks"):
        source_of(target, module_folder)


def test_a_module_of_another_target_is_refused(made):
    target, _, _ = made("llama")
    dims = read_dims(target)
    job = GraphJob("draft", str(made("qwen3")[1]), options=MtpOptions(2, False))
    from dataclasses import replace

    context = SourceContext("checkpoint", 64, 6, replace(dims, hidden_size=64), GraphJob("target", str(target)))
    with pytest.raises(RecipeError, match="target states of 32"):
        DraftSource(job, context)


def test_a_target_without_a_module_says_so(made):
    target, _, _ = made("llama")
    with pytest.raises(CheckpointError, match="no keys of a speculator"):
        source_of(target, target)


def test_a_state_that_the_module_was_not_trained_on_is_refused(made, tmp_path):
    target, _, module = made("llama")
    config, _ = lab.random_module(target, target_hidden="before_norm")
    module_folder = lab.write_alone(tmp_path / "module", config, module)
    with pytest.raises(RecipeError, match=r"speculator\.target_hidden.*expected 2: the checkpoint says before_norm"):
        source_of(target, module_folder)
    source_of(target, module_folder, reads_normed=False)
    with pytest.raises(RecipeError, match="expected after_norm"):
        source_of(target, made("llama")[1], reads_normed=False)


def test_a_latent_module_has_one_cache_of_latents_and_rotated_keys(made):
    target, model, _ = made("deepseek_v3")
    spec = source_of(target, model).spec()
    assert [spec.input(name).dims for name in spec.caches] == [("batch", 1, "max_seq", 16 + 4)]


@pytest.mark.parametrize("family", ["llama", "glm4_moe"])
def test_random_weights_need_a_config_alone(family, made, tmp_path):
    target, _, _ = made(family)
    (tmp_path / "config.json").write_bytes((target / "config.json").read_bytes())
    source = source_of(tmp_path, tmp_path, "random")
    (engine,) = compiled(source, tmp_path / "graph")
    assert source.check_compiled(engine, 4)["num_tokens"] == 2
    assert source.counts().num_params > 0


def test_a_recipe_drafts_chains_where_it_asks_for_no_tree():
    assert MtpConfig(num_draft_tokens=3).shape is None and not MtpConfig().has_tree
    assert MtpConfig().candidates_needed == 1
    assert MtpConfig(tree={"widths": [2, 2]}).candidates_needed == 2
    assert MtpConfig(tree="auto").candidates_needed == 8


def test_without_a_model_the_targets_own_module_drafts():
    from speccompile.core import registry

    method = registry.method("mtp")
    (job,) = method.graph_jobs(MtpConfig())
    assert job.model == AS_TARGET
    assert method.target_outputs(MtpConfig()).hidden
    assert method.target_outputs(MtpConfig(target_hidden=2)).hidden_layers == (2,)
    with pytest.raises(RecipeError, match="target_hidden"):
        MtpConfig(target_hidden=-1)
