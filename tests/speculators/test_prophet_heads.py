# SPDX-License-Identifier: Apache-2.0
"""A Prophet transformer against a twin that runs whole sequences: chains, fixed trees and grown ones."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from speccompile.core import specs  # noqa: E402
from speccompile.core.sampling import draw, warp  # noqa: E402
from speccompile.errors import CheckpointError, RecipeError  # noqa: E402
from speccompile.speculators.prophet.checkpoint import ProphetSource  # noqa: E402
from speccompile.speculators.prophet.config import ProphetConfig as Config  # noqa: E402
from speccompile.speculators.prophet.config import ProphetMethod  # noqa: E402
from tests.pipeline import fakes  # noqa: E402
from tests.speculators import heads_lab  # noqa: E402

pytestmark = pytest.mark.export

TARGET, WIDTH, VOCAB, HEADS, KV_HEADS, HEAD_DIM, INNER = 24, 16, fakes.VOCAB, 4, 2, 4, 20
CHOICES = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 1], [1, 0, 0]]
TREES = {"choices": (CHOICES, 2), "auto": ("auto", 1)}


def config(**changed):
    return {
        "model_type": "prophet", "vocab_size": VOCAB, "target_hidden_size": TARGET, "hidden_size": WIDTH,
        "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "horizon": 6, "rope_theta": 100.0,
        "rms_norm_eps": 1e-5, "uses_target_embeddings": False, "tie_word_embeddings": False, **changed,
    }  # fmt: skip


def weights(known, seed=0):
    rng, width = np.random.default_rng(seed), known["hidden_size"]
    shapes = {"input_proj.weight": (width, TARGET), "norm.weight": (width,)}
    for i in range(known["num_hidden_layers"]):
        rows = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
        shapes |= {f"layers.{i}.self_attn.{n}_proj.weight": (rows[n] * HEAD_DIM, width) for n in rows}
        shapes[f"layers.{i}.self_attn.o_proj.weight"] = (width, HEADS * HEAD_DIM)
        shapes |= {f"layers.{i}.mlp.{n}_proj.weight": (INNER, width) for n in ("gate", "up")}
        shapes[f"layers.{i}.mlp.down_proj.weight"] = (width, INNER)
        shapes |= {f"layers.{i}.{n}.weight": (width,) for n in ("input_layernorm", "post_attention_layernorm")}
    if not known["uses_target_embeddings"]:
        shapes["embed_tokens.weight"] = (VOCAB, width)
        if not known["tie_word_embeddings"]:
            shapes["lm_head.weight"] = (VOCAB, width)
    scales = {name: 0.3 if len(shape) > 1 else 0.2 for name, shape in shapes.items()}
    scales |= {"embed_tokens.weight": 1.0, "lm_head.weight": 1.0}
    made = {n: rng.normal(size=shape) * scales[n] + (len(shape) == 1) for n, shape in shapes.items()}
    return {n: value.astype(np.float32) for n, value in made.items()}


def write(folder, known):
    from safetensors.numpy import save_file

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(known))
    held = weights(known)
    save_file(held, folder / "model.safetensors")
    return held


def open_source(folder, hidden=TARGET, vocab=VOCAB, target="", weights="checkpoint", **fields):
    (job,) = ProphetMethod().graph_jobs(Config(str(folder), **fields))
    return ProphetSource(job, heads_lab.context(hidden, vocab, weights, target))


def norm(x, weight):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight


def rotate(x, theta=100.0):
    """x: [nodes, heads, head_dim], rotary positions in halves."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    left, right = x[..., :half], x[..., half:]
    return np.concatenate((left * cos - right * sin, right * cos + left * sin), -1)


def logits_of(held, embeddings, lm_head, num_layers):
    """The twin: the whole sequence [proj(state), emb(root), ...] at once, causal, no cache."""

    def run(state, tokens):
        x = np.stack([held["input_proj.weight"] @ state, *(embeddings[t] for t in tokens)])
        nodes = len(x)
        for i in range(num_layers):
            w = {n.removeprefix(f"layers.{i}."): v for n, v in held.items() if n.startswith(f"layers.{i}.")}
            y = norm(x, w["input_layernorm.weight"])
            q, k, v = ((y @ w[f"self_attn.{n}_proj.weight"].T).reshape(nodes, -1, HEAD_DIM) for n in "qkv")
            q, k = rotate(q), rotate(k)
            k, v = (np.repeat(t, HEADS // KV_HEADS, 1) for t in (k, v))
            scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD_DIM)
            scores = np.where(np.tri(nodes, dtype=bool), scores, -np.inf)
            probs = np.exp(scores - scores.max(-1, keepdims=True))
            probs /= probs.sum(-1, keepdims=True)
            x = x + np.einsum("hqk,khd->qhd", probs, v).reshape(nodes, -1) @ w["self_attn.o_proj.weight"].T
            y = norm(x, w["post_attention_layernorm.weight"])
            gate = y @ w["mlp.gate_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * (y @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
        return lm_head @ norm(x[-1], held["norm.weight"])

    return run


def made(tmp_path, **changed):
    """(weights, logits, target folder) of a checkpoint that was written."""
    known = config(**changed)
    held = {n: w.astype(np.float64) for n, w in write(tmp_path / "in", known).items()}
    if not known["uses_target_embeddings"]:
        tables = held["embed_tokens.weight"], held.get("lm_head.weight", held["embed_tokens.weight"])
        return held, logits_of(held, *tables, known["num_hidden_layers"]), ""
    from safetensors.numpy import load_file

    fakes.make_checkpoint(tmp_path / "target", hidden=TARGET)
    table = load_file(tmp_path / "target/model.safetensors")["model.embed_tokens.weight"].astype(np.float64)
    return held, logits_of(held, table, table, known["num_hidden_layers"]), str(tmp_path / "target")


@pytest.mark.parametrize("name", TREES)
def test_a_tree_is_that_of_whole_sequences(name, tmp_path):
    tree, num_layers = TREES[name]
    _, logits, _ = made(tmp_path, num_hidden_layers=num_layers)
    source = open_source(tmp_path / "in", tree=tree, tree_width=3, tree_depth=3, num_candidates=3)
    source.check()
    given = heads_lab.feeds(TARGET, VOCAB)
    for engine in heads_lab.engines(source, tmp_path):
        heads_lab.check_tree(engine, source.form, logits, given)


@pytest.mark.parametrize("tables", ["tied", "target"])
def test_a_chain_is_that_of_whole_sequences(tables, tmp_path):
    uses_target = tables == "target"
    width = TARGET if uses_target else WIDTH
    changed = {"hidden_size": width, "uses_target_embeddings": uses_target, "tie_word_embeddings": tables == "tied"}
    _, logits, target = made(tmp_path, **changed)
    source = open_source(tmp_path / "in", target=target, max_draft_tokens=3)
    source.check()
    assert any(name.startswith("target/") for name in source.digests()) is uses_target
    rng = np.random.default_rng(3)
    given = heads_lab.feeds(TARGET, VOCAB) | {
        specs.UNIFORMS: rng.random((3, 3)).astype(np.float32),
        specs.TEMPERATURE: np.array([1.0, 0.0, 0.7], np.float32),
        specs.TOP_K: np.array([0, 0, 6]),
    }
    for engine in heads_lab.engines(source, tmp_path):
        outputs = engine.run(given)
        for slot, state in enumerate(heads_lab.starts(given)):
            tokens = [int(given[specs.TOKENS][slot, 0])]
            for i in range(3):
                row = logits(state, tokens).astype(np.float32)[None]
                dist = warp(row, given[specs.TEMPERATURE][[slot]], given[specs.TOP_K][[slot]], np.ones(1))[0]
                np.testing.assert_allclose(outputs[specs.CHAIN_PROBS][slot, i + 1], dist, atol=1e-5)
                tokens.append(int(draw(dist, given[specs.UNIFORMS][slot, i])))
            assert outputs[specs.SAMPLED_TOKENS][slot].tolist() == tokens[1:]


def test_sizes_are_counted_and_random_weights_need_a_config_alone(tmp_path):
    for is_tied in (False, True):
        held, _, _ = made(tmp_path, tie_word_embeddings=is_tied, num_hidden_layers=2)
        source = open_source(tmp_path / "in")
        source.check()
        assert source.counts().num_params == sum(w.size for w in held.values())
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/config.json").write_text(json.dumps(config(uses_target_embeddings=True, hidden_size=TARGET)))
    source = open_source(tmp_path / "bare", weights="random", target=str(tmp_path / "in"), max_draft_tokens=1)
    _, dims = source.export(lambda stage: None)
    # This target's embeddings are its LM head: the graph has one table of the two that are counted.
    assert dims.num_params == source.counts().num_params - dims.vocab_size * TARGET and dims.uses_target_embeddings
    assert set(source.digests()) == {"config.json", "target/config.json"}


@pytest.mark.parametrize(
    ("sizes", "fields", "message"),
    [
        ({"hidden": 48}, {}, "got a target of hidden size 24; expected 48, as the target has"),
        ({"vocab": 99}, {}, "got a vocabulary of 32 tokens; expected 99"),
        ({}, {"num_draft_tokens": 17}, r"engine\.max_draft_nodes: got 16; expected at least 17"),
    ],
)
def test_a_speculator_of_another_target_is_refused(sizes, fields, message, tmp_path):
    write(tmp_path / "in", config())
    with pytest.raises(RecipeError, match=message):
        open_source(tmp_path / "in", **sizes, **fields)


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"model_type": "llama"}, "got 'llama'; expected 'prophet'"), ({"horizon": None}, r"\(horizon\): got nothing")],
)
def test_another_config_is_refused(changed, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config(**changed)))
    with pytest.raises(CheckpointError, match=message):
        open_source(tmp_path, weights="random")
