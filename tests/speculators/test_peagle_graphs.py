# SPDX-License-Identifier: Apache-2.0
"""P-EAGLE's graphs with their caches, through the drafting that feeds them, against numpy over whole texts."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from speccompile.checkpoints.checkpoint import read_dims
from speccompile.core import registry
from speccompile.core.jobs import GraphJob, MethodContext, SourceContext
from speccompile.core.specs import CANDIDATE_PROBS, CANDIDATES, hidden_name
from speccompile.drafting.acceptance import DraftState
from speccompile.drafting.feature_drafts import fused_features
from speccompile.drafting.mask_drafts import MaskFeatureCache
from speccompile.errors import CheckpointError, RecipeError
from speccompile.speculators.eagle3.config import Eagle3Config, Eagle3Method

pytest.importorskip("torch")

from tests.speculators import eagle_lab, peagle_lab

BACKENDS = ("reference", "onnxruntime")
TOLERANCE = 1e-5  # of probabilities; a mask whose position is off by one changes them by 0.01 and more
MAX_SEQ, MAX_NODES, NUM_DRAFTS = 48, 6, 4
# What two sequences say, and how they go on: the accepted draft tokens and the token after them.
TEXTS = ([3, 1, 4, 1, 5, 9, 2], [8, 2])
MORE = (([6, 5, 3], [7]), ([5], [0, 11, 4, 30]))
WINDOW = 3
VARIANTS = {
    "plain": {},
    "windowed": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW},
    "normed": {"fc_norm": True, "norm_before_fc": True, "norm_output": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    checkpoints = tmp_path_factory.mktemp("peagle")
    eagle_lab.write_target(checkpoints / "target")
    for name, changes in VARIANTS.items():
        config = peagle_lab.config_of(hidden=eagle_lab.HIDDEN, **changes)
        peagle_lab.write_peagle(checkpoints / name, config, peagle_lab.tensors_of(config))
    return checkpoints


def sources(folder, name="plain", weights="checkpoint", **fields):
    config = Eagle3Config(str(folder / name), **{"tree": {"widths": [3] + [1] * (NUM_DRAFTS - 1)}, **fields})
    target = folder / "target"
    context = SourceContext(weights, MAX_SEQ, MAX_NODES, read_dims(target), GraphJob("target", str(target)))
    return [registry.find_class(job.source)(job, context) for job in Eagle3Method().graph_jobs(config)]


class Sequences:
    """Texts with states of a target, which are arbitrary numbers, as `MaskFeatureCache` is told of them."""

    def __init__(self, cache, texts):
        self.cache, self.texts = cache, [list(text) for text in texts]
        self.states = np.random.default_rng(6).normal(size=(len(texts), 90, 3 * eagle_lab.HIDDEN)).astype(np.float32)
        self.sequences = [
            SimpleNamespace(tokens=text, max_drafts=9, draft_state=DraftState(None), has_draft=True)
            for text in self.texts
        ]
        for slot, sequence in enumerate(self.sequences):
            cache.start(slot)
            read = np.array([sequence.tokens[:-1]])
            cache.prefill(slot, sequence, read, 0, self.outputs([slot], 0, read.shape[1]))
        cache.flush()

    def outputs(self, slots, starts, num):
        """Returns states of `num` positions of some sequences, by the names of the target's outputs."""
        starts = np.broadcast_to(starts, len(slots))
        rows = np.stack([self.states[p, s : s + num] for p, s in zip(slots, starts, strict=True)])
        parts = np.split(rows, 3, axis=-1)
        return {hidden_name(i): part for i, part in zip(eagle_lab.STREAMS, parts, strict=True)}

    def go_on(self, more):
        """Accepts drafts: all tokens but the last one of each row of `more`."""
        starts, nums = [len(text) - 1 for text in self.texts], [len(new) - 1 for new in more]
        path = np.broadcast_to(np.arange(max(nums) + 1), (len(more), max(nums) + 1))
        outputs = self.outputs(range(len(more)), starts, max(nums) + 1)
        batch = SimpleNamespace(sequences=self.sequences)
        self.cache.commit(batch, nums, SimpleNamespace(num_accepted=np.array(nums), path=path), outputs)
        for text, new in zip(self.texts, more, strict=True):
            text += new

    def drafted(self):
        """Returns the candidates and their probabilities after the roots and the masks, by sequence."""
        rows = [self.cache.begin(SimpleNamespace(sequences=self.sequences), range(len(self.sequences)), {})]
        rows += [self.cache._depths.after(depth, 1) for depth in range(1, NUM_DRAFTS)]
        return tuple(np.concatenate([row[name] for row in rows], 1) for name in (CANDIDATES, CANDIDATE_PROBS))

    def distance(self, found, held, **faults):
        """Returns the largest difference of the candidates' probabilities from the twin's; 1 for other candidates."""
        worst = 0.0
        for slot, (tokens, sure) in enumerate(zip(*found, strict=True)):
            text = self.texts[slot]
            states = self.states[slot, : len(text) - 1]
            wanted = peagle_lab.probs_after(held, states, text[1:], NUM_DRAFTS - 1, **faults)
            best = wanted.argsort(-1)[:, ::-1][:, : tokens.shape[1]]
            if not faults.keys() - {"window"} and not np.array_equal(tokens, best):
                return 1.0
            worst = max(worst, np.abs(np.take_along_axis(wanted, tokens, 1) - sure).max())
        return worst


def make_cache(folder, checkpoints, name="plain", backend="onnxruntime"):
    draft, fusion = sources(folder, name)
    draft.check(), fusion.check()
    assert (draft.spec().mask_token, draft.spec().num_drafts) == (peagle_lab.MASK, NUM_DRAFTS)
    [engine] = eagle_lab.compiled(draft, checkpoints, backend, rows=MAX_SEQ + MAX_NODES + 1)
    [fused] = eagle_lab.compiled(fusion, checkpoints, backend)
    return MaskFeatureCache(engine, *fused_features(fused), MAX_SEQ, MAX_NODES + 1, NUM_DRAFTS)


@pytest.mark.parametrize(("name", "backend"), [("plain", "reference"), *((name, "onnxruntime") for name in VARIANTS)])
def test_the_draft_reads_masks_after_the_root_and_forgets_them(folder, tmp_path, name, backend):
    cache = make_cache(folder, tmp_path, name, backend)
    held = peagle_lab.tensors_of(peagle_lab.config_of(hidden=eagle_lab.HIDDEN, **VARIANTS[name]))
    said = Sequences(cache, TEXTS)
    states = held["mask_hidden"].reshape(1, -1)
    wrong = [
        {"shift": 1},
        {"shift": -1},
        {"stale": 1},
        {"mask": 0},
        {"mask_feature": 0 * peagle_lab.fuse(held, states)},
    ]
    window = {"window": WINDOW} if name == "windowed" else {}
    # Rows of rejected drafts that are counted would age the window, as they would be attended to.
    wrong += [{"window": num} for num in (WINDOW - 1, WINDOW + 1, 0) if window]
    if name == "normed":
        wrong.append({"mask_feature": peagle_lab.fuse(held, states, is_normed=False)})
    for more in (*MORE, None):
        found = said.drafted()
        assert said.distance(found, held, **window) < TOLERANCE
        for fault in wrong:
            assert said.distance(found, held, **{**window, **fault}) > 100 * TOLERANCE, fault
        assert cache.lengths == [len(text) - 1 for text in said.texts]
        said.go_on(more or ([1], [1]))


def test_a_full_cache_reads_its_accepted_rows_first_beside_one_that_is_not(folder, tmp_path):
    """Rows of masks after many accepted ones would lie after the cache's last row."""
    cache = make_cache(folder, tmp_path)
    held = peagle_lab.tensors_of(peagle_lab.config_of(hidden=eagle_lab.HIDDEN))
    said = Sequences(cache, ([i * 7 % 36 for i in range(MAX_SEQ - 1)], TEXTS[0]))
    said.drafted()
    said.go_on(([1], [1, 2, 3, 4, 5, 6, 7]))  # as many as a step may accept
    assert cache.room(0, said.sequences[0]) == 0
    tokens, sure = said.drafted()
    assert cache.lengths == [MAX_SEQ - 1, 13]
    first = peagle_lab.probs_after(held, said.states[0, : MAX_SEQ - 1], said.texts[0][1:], 0)
    np.testing.assert_allclose(np.take_along_axis(first, tokens[0, :1], 1), sure[0, :1], atol=TOLERANCE)
    said.texts, said.states = said.texts[1:], said.states[1:]
    assert said.distance((tokens[1:], sure[1:]), held) < TOLERANCE


def test_what_the_recipe_says_of_masks_decides_with_the_checkpoint(folder, tmp_path):
    for fields, token in (
        ({}, 37),
        ({"parallel_drafting": True}, 37),
        ({"parallel_drafting": False}, None),
        ({"tree": "chain", "num_draft_tokens": 1}, None),
    ):
        assert sources(folder, **fields)[0].spec().mask_token == token
    heads = eagle_lab.random_eagle3(eagle_lab.config_of())
    eagle_lab.write_eagle3(tmp_path / "eagle3", heads)
    eagle_lab.write_target(tmp_path / "target")
    assert sources(tmp_path, "eagle3")[0].spec().mask_token is None
    with pytest.raises(CheckpointError, match=r"\(ptd_token_id or .*\): got None; expected a token of the 40"):
        sources(tmp_path, "eagle3", parallel_drafting=True)
    plain = peagle_lab.config_of(ptd_token_id=None, parallel_drafting=None)
    own = ("draft_vocab_size", "target_hidden_size", "norm_before_residual", "eagle_aux_hidden_state_layer_ids")
    nested = {k: plain.pop(k) for k in own} | {"speculators_model_type": "peagle", "transformer_layer_config": plain}
    for name, held in (("random", {**nested, "mask_token_id": 5}), ("named", nested)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(held))
    assert sources(tmp_path, "random", "random")[0].spec().mask_token == 5
    with pytest.raises(CheckpointError, match="got None"):
        sources(tmp_path, "named", "random")


def test_a_bundle_without_masks_or_with_too_few_is_refused_at_load(folder, tmp_path):
    draft, fusion = sources(folder)
    plain = sources(folder, parallel_drafting=False)[0]
    [fused] = eagle_lab.compiled(fusion, tmp_path / "fusion")
    context = MethodContext(2, MAX_SEQ, MAX_NODES)
    rows = MAX_SEQ + MAX_NODES + 1
    for source, fields, words in (
        (plain, {"parallel_drafting": True}, "parallel_drafting: got a drafter built without a mask token"),
        (draft, {"num_draft_tokens": 5}, "a draft built for 4 tokens; expected 5 on a path"),
    ):
        [engine] = eagle_lab.compiled(source, tmp_path / words[:5], rows=rows)
        config = Eagle3Config("d", tree="chain", drafts="greedy", **fields)
        with pytest.raises(RecipeError, match=words):
            Eagle3Method().make_proposer(config, {"draft": engine, "fusion": fused}, context)
