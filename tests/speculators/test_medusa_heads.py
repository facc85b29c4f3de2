# SPDX-License-Identifier: Apache-2.0
"""Medusa heads against the formula: checkpoints in, graphs out, with heads of their own and with the target's."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from speccompile.core import specs  # noqa: E402
from speccompile.core.jobs import GraphJob  # noqa: E402
from speccompile.errors import CheckpointError, RecipeError  # noqa: E402
from speccompile.speculators.medusa.checkpoint import HeadsSource  # noqa: E402
from speccompile.speculators.medusa.config import MedusaConfig as Config  # noqa: E402
from speccompile.speculators.medusa.config import MedusaMethod  # noqa: E402
from tests.pipeline import fakes  # noqa: E402
from tests.speculators import heads_lab  # noqa: E402

pytestmark = pytest.mark.export

HIDDEN, VOCAB, NUM_HEADS, NUM_LAYERS = 24, fakes.VOCAB, 3, 2


def weights(uses_target=False, seed=0, num_heads=NUM_HEADS):
    rng = np.random.default_rng(seed)
    made = {}
    for head in range(num_heads):
        for layer in range(NUM_LAYERS):
            made[f"{head}.{layer}.linear.weight"] = rng.normal(size=(HIDDEN, HIDDEN)) * 0.3
            made[f"{head}.{layer}.linear.bias"] = rng.normal(size=HIDDEN) * 0.3
        if not uses_target:
            made[f"{head}.{NUM_LAYERS}.weight"] = rng.normal(size=(VOCAB, HIDDEN))
    return {name: value.astype(np.float32) for name, value in made.items()}


def write(folder, held, **config):
    from safetensors.numpy import save_file

    folder.mkdir(exist_ok=True)
    known = {"medusa_num_heads": NUM_HEADS, "medusa_num_layers": NUM_LAYERS, **config}
    (folder / "config.json").write_text(json.dumps(known))
    save_file(held, folder / "medusa_lm_head.safetensors")
    return folder


def open_source(folder, hidden=HIDDEN, vocab=VOCAB, target="", weights="checkpoint", **config):
    (job,) = MedusaMethod().graph_jobs(Config(str(folder), **config))
    return HeadsSource(job, heads_lab.context(hidden, vocab, weights, target))


def logits_of(held, state, lm_head=None):
    """[heads, vocab] float64 from the formula: x + SiLU(W x + b), layer by layer, then the LM head."""
    rows = []
    for head in range(NUM_HEADS):
        x = state
        for layer in range(NUM_LAYERS):
            z = held[f"{head}.{layer}.linear.weight"] @ x + held[f"{head}.{layer}.linear.bias"]
            x = x + z / (1 + np.exp(-z))
        rows.append((held[f"{head}.{NUM_LAYERS}.weight"] if lm_head is None else lm_head) @ x)
    return np.stack(rows)


@pytest.mark.parametrize("uses_target", [False, True])
def test_a_checkpoint_becomes_a_graph_that_computes_the_formula(uses_target, tmp_path):
    held = weights(uses_target)
    folder = write(tmp_path / "in", held, original_lm_head=uses_target, vocab_size=VOCAB)
    lm_head, target = None, ""
    if uses_target:
        from safetensors.numpy import load_file

        target = str(tmp_path / "target")
        fakes.make_checkpoint(tmp_path / "target", hidden=HIDDEN)
        lm_head = load_file(tmp_path / "target/model.safetensors")["model.embed_tokens.weight"].astype(np.float64)
    source = open_source(folder, target=target, num_candidates=5)
    source.check()
    assert any(name.startswith("target/") for name in source.digests()) is uses_target
    model, dims = source.export(lambda stage: None)
    tables = VOCAB * HIDDEN * (1 if uses_target else NUM_HEADS)
    assert dims.num_params == NUM_HEADS * NUM_LAYERS * HIDDEN * (HIDDEN + 1) + tables
    assert sum(v.const_value.size for v in model.graph.initializers.values()) >= dims.num_params
    given = heads_lab.feeds(HIDDEN, VOCAB)
    del given[specs.TOKENS]
    for engine in heads_lab.engines(source, tmp_path):
        outputs = engine.run(given)
        assert outputs[specs.CANDIDATES].shape == (3, NUM_HEADS, 5)
        for slot, state in enumerate(heads_lab.starts(given)):
            for head, logits in enumerate(logits_of(held, state, lm_head)):
                best, probs = heads_lab.likeliest(logits, 5)
                np.testing.assert_array_equal(outputs[specs.CANDIDATES][slot, head], best)
                np.testing.assert_allclose(outputs[specs.CANDIDATE_PROBS][slot, head], probs, rtol=1e-4)


def test_the_first_heads_alone_are_the_same_heads(tmp_path):
    source = open_source(write(tmp_path / "in", weights()), num_heads=2, num_candidates=4)
    source.check()
    given = heads_lab.feeds(HIDDEN, VOCAB)
    del given[specs.TOKENS]
    engine = next(heads_lab.engines(source, tmp_path))
    candidates = engine.run(given)[specs.CANDIDATES]
    assert candidates.shape == (3, 2, 4)
    for slot, state in enumerate(heads_lab.starts(given)):
        for head in range(2):
            assert candidates[slot, head].tolist() == heads_lab.likeliest(logits_of(weights(), state)[head], 4)[0]


def test_a_config_that_states_another_number_is_refused_until_the_recipe_gives_it(tmp_path):
    """Published configs say 2 where 5 heads are stored."""
    folder = write(tmp_path / "in", weights(), medusa_num_heads=2)
    source = open_source(folder)
    with pytest.raises(CheckpointError, match=r"medusa_num_heads.*got 2; expected 3, as many as are stored"):
        source.check()
    for num in (3, 2):
        source = open_source(folder, num_heads=num)
        source.check()
        assert source.dims.num_heads == 3 and source.spec().output(specs.CANDIDATES).dims[1] == num


def test_random_weights_need_a_config_alone(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 4, "medusa_num_layers": 1}))
    source = open_source(tmp_path, weights="random")
    assert (source.dims.num_drafts, source.dims.hidden_size, source.dims.vocab_size) == (4, HIDDEN, VOCAB)
    assert list(source.digests()) == ["config.json"]


@pytest.mark.parametrize(
    ("sizes", "config", "message"),
    [
        ({"hidden": 48}, {}, "got a hidden size of 24; expected 48, as the target has"),
        ({"vocab": 99}, {}, "got a vocabulary of 32 tokens; expected 99"),
        ({}, {"num_heads": 4}, r"speculator\.num_heads: got 4; expected at most 3"),
        ({}, {"tree": {"widths": [2, 1, 1, 1]}}, r"speculator\.tree: got a depth of 4; expected a depth of at most 3"),
    ],
)
def test_heads_of_another_target_or_too_few_are_refused(sizes, config, message, tmp_path):
    folder = write(tmp_path / "in", weights())
    with pytest.raises(RecipeError, match=message):
        open_source(folder, **sizes, **config)


def test_a_folder_without_heads_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(CheckpointError, match=r"medusa_num_heads.*got None; expected a positive integer"):
        open_source(tmp_path, weights="random")


def test_the_number_of_candidates_follows_the_tree():
    def candidates(**config):
        (job,) = MedusaMethod().graph_jobs(Config("m", **config))
        assert isinstance(job, GraphJob)
        return job.options.num_candidates, job.options.least_heads

    assert candidates(tree="chain") == (1, 0) and candidates() == (8, 0) and candidates(num_candidates=3) == (3, 0)
    assert candidates(tree=[[0], [1], [0, 4]]) == (5, 2) and candidates(tree={"widths": [4, 2, 1]}) == (4, 3)
