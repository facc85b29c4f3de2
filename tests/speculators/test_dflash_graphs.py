# SPDX-License-Identifier: Apache-2.0
"""The graphs of block drafters against plain torch: prompts in parts, ragged steps, refused drafts, variants."""

import json
import shutil

import numpy as np
import pytest

from speccompile.checkpoints.checkpoint import read_dims
from speccompile.core import registry
from speccompile.core.jobs import GraphJob, SourceContext
from speccompile.core.specs import (
    CANDIDATE_PROBS,
    CANDIDATES,
    FEATURE_NODES,
    FEATURES,
    LENGTHS,
    START_NODES,
    TOKENS,
    hidden_name,
)
from speccompile.drafting.block_drafts import PathLattice
from speccompile.drafting.tree import Expansion
from speccompile.errors import CheckpointError, RecipeError
from speccompile.graph_kinds.blocks import PAIR_SCORES

torch = pytest.importorskip("torch")

from tests.e2e.test_tree_cache import caches_of  # noqa: E402
from tests.speculators import dflash_lab as lab  # noqa: E402
from tests.speculators import domino_lab, eagle_lab  # noqa: E402

MAX_SEQ, MAX_NODES, NUM = 60, 10, 5
TOLERANCE = 1e-5  # of the largest number: float32 sums in another order differ by about 1e-6
STREAMS = torch.randn((2, 24, 3 * lab.HIDDEN), generator=torch.Generator().manual_seed(1))
METHOD = registry.method("dflash")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    checkpoints = tmp_path_factory.mktemp("blocks")
    eagle_lab.write_target(checkpoints / "target")
    for kind, made in lab.KINDS.items():
        lab.write(checkpoints / kind, made)
    # The same drafter in the other layout.
    shutil.copytree(checkpoints / "one", checkpoints / "other")
    config = lab.speculators_config(lab.KINDS["one"], checkpoints / "target")
    (checkpoints / "other/config.json").write_text(json.dumps(config))
    return checkpoints


def sources(folder, name, weights="checkpoint", max_draft_nodes=MAX_NODES, **fields):
    config = METHOD.Config(str(folder / name), **{"tree": "chain", "slot_candidates": NUM, **fields})
    target = folder / "target"
    context = SourceContext(
        weights, MAX_SEQ, max_draft_nodes, read_dims(target), GraphJob("target", str(target), options=None)
    )
    found = [registry.find_class(job.source)(job, context) for job in METHOD.graph_jobs(config)]
    return [source for source in found if source.is_needed]


@pytest.fixture(scope="module")
def engine(folder):
    made = {}

    def load(name, number=0):
        if (name, number) not in made:
            source = sources(folder, name)[number]
            source.check()
            rows = MAX_SEQ + MAX_NODES + 1 + source.spec().rows_written_ahead
            made[name, number] = eagle_lab.compiled(source, folder / f"graphs-{name}", rows=rows)[0]
            source.check_compiled(made[name, number], MAX_NODES)
        return made[name, number]

    return load


def run(engine, features, roots, lengths, counts, first_slot=0):
    """Reads `counts` positions of each slot after `lengths`; returns candidates, scores, and all outputs."""
    width = max(counts)
    rows = np.array([[min(n + i, features.shape[1] - 1) for i in range(width)] for n in lengths])
    feeds = {TOKENS: np.array(roots)[:, None], LENGTHS: np.array(lengths), FEATURES: features, FEATURE_NODES: rows}
    outputs = engine.run({**feeds, START_NODES: np.array(counts) - 1}, first_slot=first_slot)
    made = {t.name: np.array(outputs[t.name]) for t in engine.spec.plain_outputs}
    return made[CANDIDATES], made[PAIR_SCORES], made


def gap(got, wanted):
    """Returns the largest difference of scores over the largest score; infinite where candidates differ."""
    tokens, scores = (value.numpy() for value in wanted)
    return np.abs(got[1] - scores).max() / np.abs(scores).max() if np.array_equal(got[0], tokens) else np.inf


def steps(engine, twin):
    """Yields (block of a slot, text, positions read, root) of a ragged batch whose drafts are all but one refused."""
    features = np.stack([twin.features(streams).numpy() for streams in STREAMS])
    run(engine, features[1:], [9], [0], [7], first_slot=1)  # the second slot has read a prompt
    reads = (((0, 7), (3, 4)), ((3, 11), (1, 2)), ((4, 13), (5, 1)), ((9, 14), (2, 3)))
    for number, (lengths, counts) in enumerate(reads):
        roots = [5 + number, 30 - number]
        candidates, scores, _ = run(engine, features, roots, lengths, counts)
        for slot in range(2):
            yield (candidates[slot], scores[slot]), slot, lengths[slot] + counts[slot], roots[slot]


@pytest.mark.parametrize("kind", lab.KINDS)
def test_every_block_is_the_twins(folder, engine, kind):
    twin, loaded = lab.twin(folder / kind, folder / "target"), engine(kind)
    seen = list(steps(loaded, twin))
    for got, slot, num, root in seen:
        assert got[1].shape[1] == (1 if kind in ("one", "path") else NUM)
        assert gap(got, twin.block(STREAMS[slot, :num], root, loaded.spec.num_drafts, NUM)) < TOLERANCE
    assert len(seen) == 8


def test_no_row_of_a_draft_stays_in_the_cache(folder, engine):
    loaded, twin = engine("two"), lab.twin(folder / "two", folder / "target")
    last = {slot: num for _, slot, num, _ in steps(loaded, twin)}
    held = {slot: [rows[slot, :, :num].copy() for rows in caches_of(loaded)] for slot, num in last.items()}
    features = np.stack([twin.features(streams).numpy() for streams in STREAMS])
    for slot, num in last.items():
        run(loaded, features[slot : slot + 1], [1], [0], [num], first_slot=slot)
        fresh = [rows[slot, :, :num] for rows in caches_of(loaded)]
        for got, wanted in zip(held[slot], fresh, strict=True):
            assert np.abs(got - wanted).max() < 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        *(("two", fault) for fault in ("slots", "positions", "taps", "predecessor", "multiplier")),
        ("spark", "slots"),
        ("spark", "predecessor"),
        ("one", "slots"),
        *(("corrected", fault) for fault in ("partition", "anchor", "distances", "unary")),
    ],
)
def test_a_fault_in_one_of_them_is_noticed(folder, engine, kind, fault):
    right, wrong = lab.twin(folder / kind, folder / "target"), lab.twin(folder / kind, folder / "target", (fault,))
    loaded = engine(kind)
    num_drafts = min(loaded.spec.num_drafts, 4)
    for got, slot, num, root in steps(loaded, right):
        got = tuple(value[:num_drafts] for value in got)
        assert gap(got, wrong.block(STREAMS[slot, :num], root, num_drafts, NUM)) > 1e-3


@pytest.fixture(scope="module")
def walked(folder, engine):
    """Returns (slot, root, positions read, path, candidates and probabilities after it) of trees over two blocks."""
    twin, block, step = lab.twin(folder / "path", folder / "target"), engine("path"), engine("path", 2)
    features, found = np.stack([twin.features(streams).numpy() for streams in STREAMS]), []
    for lengths, counts, roots in (([0, 0], [7, 9], [5, 30]), ([7, 9], [3, 1], [6, 29])):
        made = run(block, features, roots, lengths, counts)[2]
        lattice, reads = PathLattice(step, made, lab.VOCAB), np.add(lengths, counts).tolist()
        parents, paths = [-1], [[()], [()]]  # by slot, the path of each node
        outputs = lattice.after_roots({})
        found += [(s, roots[s], reads[s], (), outputs, 0) for s in range(2)]
        level, generator = [0], np.random.default_rng(len(found))
        for depth in range(1, block.spec.num_drafts):
            fresh, again = [len(parents) + i for i in range(3)], level[:1] if depth > 1 else []  # an ancestor, fed anew
            parents += [level[int(generator.integers(len(level)))] for _ in fresh]
            ranks = generator.integers(NUM, size=(2, 3))
            tokens = made[CANDIDATES][:, depth - 1][np.arange(2)[:, None], ranks]
            for slot in range(2):
                paths[slot] += [(*paths[slot][parents[n]], int(t)) for n, t in zip(fresh, tokens[slot], strict=True)]
            nodes, num = again + fresh, len(again)
            fed = np.array([[paths[slot][node][-1] for node in nodes] for slot in range(2)])
            scored = num + np.array([[0, 2, 1], [2, 0, -num]])  # the second slot scores two; its third is padding
            mask = np.broadcast_to(np.eye(len(nodes), dtype=bool), (2, len(nodes), len(nodes)))
            above = [[parents[node] for node in nodes]] * 2
            outputs = lattice.expand(Expansion(depth, fed, mask, scored, [0, 0], [nodes] * 2, above, {}))
            for slot, num_scored in ((0, 3), (1, 2)):
                kept = [nodes[column] for column in scored[slot, :num_scored]]
                found += [(slot, roots[slot], reads[slot], paths[slot][n], outputs, c) for c, n in enumerate(kept)]
            level = [fresh[0], fresh[2]]
    return [
        (s, root, num, path, np.array(outputs[CANDIDATES][s, c]), np.array(outputs[CANDIDATE_PROBS][s, c]))
        for s, root, num, path, outputs, c in found
    ]


def path_gap(twin, walked, num_drafts):
    """Returns the largest difference of a candidate's probability; infinite where tokens differ."""
    worst = 0.0
    for slot, root, num, path, tokens, probs in walked:
        with torch.no_grad():
            hidden = twin.states(STREAMS[slot, :num], root, num_drafts)
            base, candidates = (hidden @ twin.head.T).topk(NUM)
            scores = domino_lab.scores_after(twin, hidden, root, path, candidates, base)
        held = candidates[len(path)].tolist()
        assert sorted(held) == sorted(tokens.tolist())
        wanted = scores.softmax(-1)[[held.index(token) for token in tokens.tolist()]].numpy()
        assert (np.diff(probs) <= 0).all()
        worst = max(worst, float(np.abs(probs - wanted).max()))
    return worst


def test_scores_after_every_path_are_the_twins(folder, engine, walked):
    twin, num_drafts = lab.twin(folder / "path", folder / "target"), engine("path").spec.num_drafts
    assert path_gap(twin, walked, num_drafts) < TOLERANCE
    assert len({len(path) for _, _, _, path, _, _ in walked}) == num_drafts == lab.BLOCK


@pytest.mark.parametrize("fault", ["late", "order", "corrected"])
def test_a_fault_in_a_path_is_noticed(folder, engine, walked, fault):
    twin = lab.twin(folder / "path", folder / "target", (fault,))
    assert path_gap(twin, walked, engine("path").spec.num_drafts) > 1e-3


def test_features_are_the_twins(folder):
    fusion = eagle_lab.compiled(sources(folder, "two")[1], folder / "graphs-fusion")[0]
    parts = STREAMS.numpy().reshape(2, 24, 3, lab.HIDDEN)
    fed = {hidden_name(layer): parts[:, :, i] for i, layer in enumerate(lab.READ)}
    got = np.asarray(fusion.run(fed)[FEATURES])
    wanted = lab.twin(folder / "two", folder / "target").features(STREAMS).numpy()
    assert np.abs(got - wanted).max() < TOLERANCE * np.abs(wanted).max()


def test_both_layouts_say_the_same(folder):
    (draft, _), (other, _) = sources(folder, "one"), sources(folder, "other")
    assert draft.drafter == other.drafter and draft.dims == other.dims
    assert draft.dims.layers == lab.READ
    config = lab.speculators_config(lab.KINDS["two"], folder / "target")
    checkpoints = lab.write(folder / "other-two", config, lab.tensors_of(lab.KINDS["two"]))
    (draft, _), (other, _) = sources(folder, "two"), sources(folder, checkpoints.name)
    assert draft.drafter == other.drafter and draft.dims == other.dims


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"num_draft_tokens": 2}, (2, 3)),  # fewer drafts: a shorter block
        ({}, (5, 6)),
        ({"tree": "auto", "tree_depth": 3}, (3, 4)),
        ({"tree": {"widths": [2, 2]}}, (2, 3)),
        ({"sample_from_anchor": True}, (6, 6)),
        ({"max_draft_nodes": 3}, (3, 4)),
    ],
)
def test_the_block_is_as_long_as_what_is_drafted(folder, fields, wanted):
    spec = sources(folder, "one", **fields)[0].spec()
    assert (spec.num_drafts, spec.rows_written_ahead) == wanted


def test_what_cannot_be_built_is_refused_by_name(folder, tmp_path):
    cases = (
        ({"projector_type": "other"}, "got other: a head of another kind; expected dflash, dspark, lilicorr or domino"),
        ({"projector_type": "domino"}, r"gru_hidden_dim\): got None; expected a whole number, 1 or more"),
        ({"lilicorr_enabled": True}, r"lilicorr_candidate_topk\): got None; expected a whole number, 1 or more"),
        ({"markov_head_type": "gated", "markov_rank": 4}, "a Markov head with a state or a gate"),
        ({"attention_sink_bias": True}, "attention sinks"),
        ({"attention_k_eq_v": True}, "layers of Gemma 4, whose V is their K"),
        ({"block_size": 1}, "block_size.*got 1"),
        ({"mask_token_id": 40}, "mask_token_id.*got 40; expected a token below 40"),
    )
    for number, (own, words) in enumerate(cases):
        made = {**lab.KINDS["one"], "dflash_config": {**lab.KINDS["one"]["dflash_config"], **own}}
        made.pop("block_size" if "block_size" in own else "none", None)
        shutil.copytree(folder / "one", tmp_path / f"{number}")
        (tmp_path / f"{number}/config.json").write_text(json.dumps(made))
        with pytest.raises(CheckpointError, match=words):
            sources(folder, tmp_path / f"{number}")
    with pytest.raises(RecipeError, match="got 6 draft tokens on a path; expected at most 5, the drafter's block"):
        sources(folder, "one", num_draft_tokens=6)
    with pytest.raises(RecipeError, match=r"speculator\.layers: got \[1, 9, 2\]"):
        sources(folder, "one", layers=(1, 9, 2))
    with pytest.raises(RecipeError, match="got ranks up to 5; expected ranks below 5, the candidates of a slot"):
        sources(folder, "one", tree={"widths": [6]})
    with pytest.raises(RecipeError, match=r"slot_candidates: got 65"):
        METHOD.Config("d", slot_candidates=65)


@pytest.mark.parametrize("kind", lab.KINDS)
def test_weights_are_counted_before_they_are_read(folder, kind):
    for weights, least in (("checkpoint", 1.0), ("random", 0.9)):  # a config alone does not say the corrector's biases
        draft = sources(folder, kind, weights=weights)[0]
        num = sum(p.numel() for p in draft.make_module().parameters())
        assert least * num <= draft.counts().num_params <= num


def test_a_config_alone_is_enough_for_random_weights(folder, tmp_path):
    """Also with layers of a larger target, and for a target of fewer layers than are read."""
    for kind in ("two", "spark", "other"):
        checkpoints = tmp_path / kind
        checkpoints.mkdir()
        made = json.loads((folder / kind / "config.json").read_text())
        if kind == "two":
            made["dflash_config"]["target_layer_ids"] = [1, 9, 17, 25, 33]
        (checkpoints / "config.json").write_text(json.dumps(made))
        draft, fusion = sources(folder, checkpoints, weights="random")
        assert draft.drafter == sources(folder, kind)[0].drafter
        assert len(fusion.dims.layers) == (5 if kind == "two" else 3) and max(fusion.dims.layers) < 7
    draft, _ = sources(folder, tmp_path / "two", weights="random")
    assert sum(t.name.endswith("_cache.1") for t in draft.spec().inputs) == 2


def test_biases_of_queries_keys_and_values_are_read(folder):
    made = {**lab.KINDS["one"], "qkv_bias": True}
    widths = {"q_proj": 32, "k_proj": 16, "v_proj": 16}
    biases = {f"layers.0.self_attn.{name}.bias": torch.randn(num) for name, num in widths.items()}
    lab.write(folder / "biased", made, {**lab.tensors_of(made), **biases})
    source = sources(folder, "biased")[0]
    source.check()
    held = dict(source.make_module().named_parameters())
    assert all(torch.equal(held[name], bias) for name, bias in biases.items())
    assert "layers.0.self_attn.o_proj.bias" not in held
