# SPDX-License-Identifier: Apache-2.0
"""Drafts that read masks, as compiled graphs with their caches, against plain torch over whole texts."""

from types import SimpleNamespace

import numpy as np
import pytest

from speccompile.checkpoints.checkpoint import read_dims
from speccompile.core.jobs import GraphJob, SourceContext
from speccompile.core.specs import CANDIDATE_PROBS, CANDIDATES
from speccompile.drafting.mask_drafts import MaskDraftCache
from speccompile.errors import CheckpointError
from speccompile.export.decoder_source import DecoderSource
from speccompile.speculators.draft_model.config import DraftModelConfig, DraftModelMethod

torch = pytest.importorskip("torch")

from tests.speculators import eagle_lab, mask_lab  # noqa: E402

BACKENDS = ("reference", "onnxruntime")
TOLERANCE = 1e-5  # of probabilities; a mask whose position is off by one changes them by 0.01 and more
MAX_SEQ, MAX_NODES, NUM_DRAFTS = 48, 6, 4
# What two sequences say, and how they go on after drafts of which some are accepted.
TEXTS = ([3, 1, 4, 1, 5, 9, 2], [8, 2])
MORE = (([6, 5, 3], [7]), ([5], [0, 11, 4, 30]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    checkpoints = tmp_path_factory.mktemp("masks")
    eagle_lab.write_target(checkpoints / "target")
    mask_lab.save_pard(checkpoints / "pard", mask_lab.pard_model(), checkpoints / "target")
    return checkpoints


def pard_source(folder, **fields):
    config = DraftModelConfig(str(folder / "pard"), **{"tree": {"widths": [3] + [1] * (NUM_DRAFTS - 1)}, **fields})
    job, target = DraftModelMethod().graph_jobs(config)[0], folder / "target"
    return DecoderSource(
        job, SourceContext("checkpoint", MAX_SEQ, MAX_NODES, read_dims(target), GraphJob("target", str(target)))
    )


@torch.no_grad()
def wanted(model, text, shift=0, stale=0):
    """Returns the probabilities after a text and after the masks that follow it, [drafts, vocab].

    Args:
        model: of transformers.
        text: tokens.
        shift: of the masks' positions: a fault.
        stale: masks of an earlier run that are left before the last token: a fault.
    """
    masks = [mask_lab.MASK] * (NUM_DRAFTS - 1)
    tokens = torch.tensor([[*text[:-1], *[mask_lab.MASK] * stale, text[-1], *masks]])
    positions = torch.arange(tokens.shape[1])[None]
    positions = torch.where(positions > tokens.shape[1] - NUM_DRAFTS, positions + shift, positions)
    return model(tokens, position_ids=positions).logits[0, -NUM_DRAFTS:].softmax(-1).numpy()


def drafted(cache, texts):
    """Returns the candidates and their probabilities after the roots and the masks, by sequence."""
    sequences = [SimpleNamespace(tokens=list(t), max_drafts=9, grammar=None) for t in texts]
    rows = [cache.begin(SimpleNamespace(sequences=sequences), range(len(sequences)), {})]
    rows += [cache._depths.after(depth, 1) for depth in range(1, NUM_DRAFTS)]
    return tuple(np.concatenate([row[name] for row in rows], 1) for name in (CANDIDATES, CANDIDATE_PROBS))


def distance(found, texts, of):
    """Returns the largest difference of the candidates' probabilities from those of `of` for each text."""
    both = zip(*found, texts, strict=True)
    return max(np.abs(np.take_along_axis(of(text), tokens, 1) - sure).max() for tokens, sure, text in both)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_draft_reads_masks_after_the_root_and_forgets_them(folder, tmp_path, backend):
    source, model = pard_source(folder), mask_lab.pard_model()
    assert (source.spec().mask_token, source.spec().num_drafts) == (mask_lab.MASK, NUM_DRAFTS)
    [engine] = eagle_lab.compiled(source, tmp_path, backend, rows=MAX_SEQ + MAX_NODES + 1)
    cache, texts = MaskDraftCache(engine, MAX_SEQ, MAX_NODES + 1, NUM_DRAFTS), TEXTS
    for slot in range(2):
        cache.start(slot)
    for more in (*MORE, None):
        found = drafted(cache, texts)
        assert distance(found, texts, lambda text: wanted(model, text)) < TOLERANCE
        faults = ({"shift": 1}, {"shift": -1}, {"stale": 1})
        for fault in faults:
            assert distance(found, texts, lambda text, fault=fault: wanted(model, text, **fault)) > 100 * TOLERANCE
        assert cache.lengths == [len(text) for text in texts]
        cache.commit(None, [0, 0], None, {})
        texts = [[*text, *new] for text, new in zip(texts, more or ((), ()), strict=True)]


def test_a_cache_that_is_nearly_full_has_fewer_masks_beside_one_that_is_not(folder, tmp_path):
    source, model = pard_source(folder), mask_lab.pard_model()
    [engine] = eagle_lab.compiled(source, tmp_path, rows=MAX_SEQ + MAX_NODES + 1)
    cache = MaskDraftCache(engine, MAX_SEQ, MAX_NODES + 1, NUM_DRAFTS)
    texts = ([i * 7 % 36 for i in range(MAX_SEQ - 1)], TEXTS[0])
    cache.start(0), cache.start(1)
    tokens, sure = drafted(cache, texts)
    assert cache.room(0, SimpleNamespace(tokens=texts[0])) == 1
    first = wanted(model, texts[0])[:2]
    np.testing.assert_allclose(np.take_along_axis(first, tokens[0, :2], 1), sure[0, :2], atol=TOLERANCE)
    assert distance((tokens[1:], sure[1:]), texts[1:], lambda text: wanted(model, text)) < TOLERANCE


def test_the_mask_token_is_read_from_the_config(folder, tmp_path):
    import json
    import shutil

    for fields, token in (
        ({}, 37),
        ({"parallel_drafting": False}, None),
        ({"tree": "chain", "num_draft_tokens": 1}, None),
    ):
        assert pard_source(folder, **fields).spec().mask_token == token
    for name, token, words in (("none", None, "got None"), ("far", 40, "got 40; expected a token of the 40")):
        shutil.copytree(folder, tmp_path / name)
        path = tmp_path / name / "pard/config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "pard_token": token}))
        with pytest.raises(CheckpointError, match=rf"\(pard_token\): {words}"):
            pard_source(tmp_path / name, parallel_drafting=True).spec()
    assert pard_source(tmp_path / "none").spec().mask_token is None
