# SPDX-License-Identifier: Apache-2.0
"""The fused loss against plain autograd, and what is counted as a hit."""

from dataclasses import replace

import pytest
import torch

from speccompile.training import losses
from speccompile.training.losses import KINDS, LossOptions, judge, loss_terms, losses_by_autograd
from speccompile.training.stage import measures_from_sums
from speccompile.training_contract import Drafted, Selection, TrainingBatch

VOCAB, WIDTH, NODES = 29, 8, 7


def make_batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, NODES, VOCAB, generator=generator) * 2
    best = logits.softmax(-1).topk(5, -1)
    tokens = torch.randint(0, VOCAB, (2, NODES), generator=generator)
    return TrainingBatch(tokens, best.indices, best.values)


def make_drafted(seed=1, depth=3, d2t=None):
    generator = torch.Generator().manual_seed(seed)
    num = VOCAB if d2t is None else len(d2t)
    shared = torch.randn(num, WIDTH, generator=generator)
    own = torch.randn(num, WIDTH, generator=generator)
    states = torch.randn(2 * NODES, depth, WIDTH, generator=generator).requires_grad_()
    start = torch.arange(2 * NODES)[:, None]
    ahead = 1 + torch.arange(depth)
    labels = torch.where(start % NODES + ahead < NODES, start + ahead, -1)
    projections = (shared.requires_grad_(), shared, own.requires_grad_())
    return Drafted(states, labels, projections, d2t)


def loss_of(kind, dist, draft):
    """The losses as the paper has them; the target's entropy is no part of `kl`."""
    alpha = torch.minimum(dist, draft).sum()
    cross = -(dist * draft.log()).sum()
    kl, rate = cross + torch.xlogy(dist, dist).sum(), torch.exp(-3 * alpha.detach())
    return {"kl": cross, "lk": -alpha.log(), "lk_hybrid": rate * kl + (1 - rate) * (1 - alpha)}[kind], alpha.detach()


def reference(drafted, batch, kl_share, decay, kind="kl", is_chained=False):
    """The same sum in float64, row by row."""
    total, weights = 0.0, torch.tensor([decay**i for i in range(drafted.labels.shape[1])])
    dists = torch.zeros(2 * NODES, VOCAB).scatter_(1, batch.dist_tokens.flatten(0, 1), batch.dist_probs.flatten(0, 1))
    dists = dists.double() / dists.sum(-1, keepdim=True)
    for row in range(len(drafted.labels)):
        reach = 1.0
        for depth, label in enumerate(drafted.labels[row].tolist()):
            if label < 0:
                continue
            dist = dists[label] * kl_share
            offset = label % NODES
            after = int(batch.tokens.flatten()[label + 1]) if offset < NODES - 1 else int(dists[label].argmax())
            dist[after] += 1 - kl_share
            dist = dist if drafted.d2t is None else dist[drafted.d2t]
            logits = drafted.states[row, depth].double() @ drafted.projections[depth].double().T
            loss, alpha = loss_of(kind, dist, logits.softmax(-1))
            total = total + loss * weights[depth] * reach
            reach = reach * alpha if is_chained else reach
    return total / len(drafted.labels) / weights.sum()


@pytest.mark.parametrize("kl_share", [1.0, 0.4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_chained", [False, True], ids=["alone", "chained"])
@pytest.mark.parametrize("d2t", [None, torch.tensor([0, 3, 4, 9, 11, 20, 28])], ids=["whole", "reduced"])
def test_loss_and_gradients_are_those_of_autograd(monkeypatch, kl_share, kind, is_chained, d2t):
    monkeypatch.setattr(losses, "BLOCK_ROWS", {"cpu": 5})
    batch, drafted = make_batch(), make_drafted(d2t=d2t)
    if kind == "lk" and d2t is not None:  # without any of a label's tokens alpha is 0, and has no logarithm
        d2t = torch.cat((d2t, batch.dist_tokens[..., 0].flatten())).unique()
        drafted = make_drafted(d2t=d2t)
    parameters = (drafted.states, drafted.projections[0], drafted.projections[2])
    wanted = reference(drafted, batch, kl_share, 0.8, kind, is_chained)
    grads = torch.autograd.grad(wanted, parameters)
    loss, _ = judge(drafted, batch, LossOptions(kl_share, 0.8, torch.float32, kind, is_chained), VOCAB)
    torch.testing.assert_close(loss, wanted.detach().float(), rtol=1e-5, atol=1e-6)
    for got, grad in zip(torch.autograd.grad(loss * 2, parameters), grads, strict=True):
        torch.testing.assert_close(got, grad * 2, rtol=1e-4, atol=1e-6)


def paired(drafted, num, table):
    """Returns the drafts with scores of pairs that depend on state, token before and candidate."""
    before = torch.arange(drafted.labels.numel()).reshape(drafted.labels.shape) % VOCAB

    def score(states, before, candidates):
        return states[:, :1] * table[before[:, None], candidates]

    return replace(drafted, selection=Selection(num, before, score))


@pytest.mark.parametrize("d2t", [None, torch.tensor([0, 3, 4, 9, 11, 20, 28])], ids=["whole", "reduced"])
def test_scores_of_pairs_add_the_cross_entropy_over_the_candidates(d2t):
    batch, drafted, num = make_batch(), make_drafted(d2t=d2t), 4
    size = VOCAB if d2t is None else len(d2t)
    table = torch.randn(VOCAB, size, generator=torch.Generator().manual_seed(4)).requires_grad_()
    options = LossOptions(1.0, 0.8, torch.float32)
    plain, _ = judge(drafted, batch, options, VOCAB)
    drafted = paired(drafted, num, table)
    loss, sums = judge(drafted, batch, options, VOCAB)
    dists = torch.zeros(2 * NODES, VOCAB).scatter_(1, batch.dist_tokens.flatten(0, 1), batch.dist_probs.flatten(0, 1))
    dists /= dists.sum(-1, keepdim=True)
    weights, wanted, hits = torch.tensor([1.0, 0.8, 0.64]), 0.0, 0
    for row, depth in (drafted.labels >= 0).nonzero().tolist():
        label = int(drafted.labels[row, depth])
        dist = dists[label] if d2t is None else dists[label][d2t]
        logits = drafted.states[row, depth] @ drafted.projections[depth].T
        top, candidates = logits.topk(num)
        scores = top + drafted.states[row, depth, 0] * table[drafted.selection.before[row, depth], candidates]
        wanted = wanted - (dist[candidates] * scores.log_softmax(-1)).sum() * weights[depth]
        token = int(candidates[scores.argmax()])
        hits += (token if d2t is None else int(d2t[token])) == int(batch.dist_tokens.flatten(0, 1)[label, 0])
    wanted = wanted / len(drafted.labels) / weights.sum()
    torch.testing.assert_close(loss - plain, wanted, rtol=1e-5, atol=1e-6)
    assert int(sums[1].sum()) == hits
    parameters = (drafted.states, table)
    grads = torch.autograd.grad(wanted, parameters)
    own = torch.autograd.grad(plain, drafted.states)[0]
    for got, grad in zip(torch.autograd.grad(loss, parameters), (grads[0] + own, grads[1]), strict=True):
        torch.testing.assert_close(got, grad, rtol=1e-4, atol=1e-6)


def test_hits_and_chains_are_counted():
    batch = make_batch()
    projection = torch.eye(VOCAB)
    greedy = batch.dist_tokens.flatten(0, 1)[:, 0]
    labels = torch.tensor([[1, 2], [2, 3], [5, -1]])
    states = torch.nn.functional.one_hot(greedy[labels.clamp(min=0)], VOCAB).float()
    states[1, 0] = -states[1, 0]  # this one misses, so its chain ends at once
    drafted = Drafted(states, labels, (projection, projection))
    _, sums = judge(drafted, batch, LossOptions(1.0, 1.0, torch.float32), VOCAB)
    _, hits, tried, kept, chains, alphas, reached = sums.tolist()
    assert hits == [2, 2] and tried == [3, 2]
    assert kept == [1, 1] and chains == [2, 2]  # the third row is not a whole chain
    drafts = states.softmax(-1)
    wanted = torch.zeros(2 * NODES, VOCAB).scatter_(1, batch.dist_tokens.flatten(0, 1), batch.dist_probs.flatten(0, 1))
    alpha = torch.minimum((wanted / wanted.sum(-1, keepdim=True))[labels], drafts).sum(-1)
    assert alphas == pytest.approx([float(alpha[:, 0].sum()), float(alpha[:2, 1].sum())], rel=1e-5)
    assert reached == pytest.approx([float(alpha[:2, 0].sum()), float(alpha[:2].prod(1).sum())], rel=1e-5)
    assert measures_from_sums(sums)["acceptance_length"] == 2.0


def test_a_label_outside_the_draft_vocabulary_cannot_be_hit():
    batch = make_batch()
    greedy = batch.dist_tokens.flatten(0, 1)[:, 0]
    d2t = torch.tensor([t for t in range(VOCAB) if t != int(greedy[3])])
    states = torch.randn(1, 1, len(d2t))
    drafted = Drafted(states, torch.tensor([[3]]), (torch.eye(len(d2t)),), d2t)
    _, sums = judge(drafted, batch, LossOptions(1.0, 1.0, torch.float32), VOCAB)
    assert sums[1].tolist() == [0] and sums[2].tolist() == [1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_written_gradients_are_those_of_autograd_for_any_label(kind):
    """Labels with tokens of probability 0, equal to the draft's distribution, and far from it."""
    generator = torch.Generator().manual_seed(8)
    logits = (torch.randn(40, 12, generator=generator, dtype=torch.float64) * 3).requires_grad_()
    probs = (torch.randn(40, 12, generator=generator, dtype=torch.float64) * 3).softmax(-1)
    probs[:10, 5:] = 0.0
    probs[10:14] = logits.detach()[10:14].softmax(-1) * 1.001
    log_draft = logits.log_softmax(-1)
    wanted, alphas = losses_by_autograd(kind, probs, log_draft)
    terms = loss_terms(kind, probs, log_draft.detach())
    torch.testing.assert_close(terms.losses, wanted.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(terms.alphas, alphas.detach(), rtol=1e-12, atol=1e-12)
    [grad] = torch.autograd.grad(wanted.sum(), logits)
    got = terms.on_draft[:, None] * log_draft.detach().exp() + terms.on_kept
    torch.testing.assert_close(got, grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_written_gradients_by_the_label_are_those_of_autograd(kind):
    generator = torch.Generator().manual_seed(9)
    logits, draft = (torch.randn(40, 12, generator=generator, dtype=torch.float64) * 3 for _ in range(2))
    probs = logits.softmax(-1).requires_grad_()
    wanted, _ = losses_by_autograd(kind, probs, draft.log_softmax(-1))
    [grad] = torch.autograd.grad(wanted.sum(), probs)
    terms = loss_terms(kind, probs.detach(), draft.log_softmax(-1))
    torch.testing.assert_close(terms.on_label, grad, rtol=1e-10, atol=1e-12)


def test_the_likelihood_of_acceptance_has_finite_gradients_where_nothing_is_accepted():
    probs, log_draft = torch.tensor([[1.0, 0.0]]), torch.tensor([[-200.0, 0.0]])
    terms = loss_terms("lk", probs, log_draft)
    assert all(torch.isfinite(part).all() for part in terms) and float(terms.losses) > 60


def test_scores_of_pairs_are_judged_by_the_same_loss():
    batch, num = make_batch(), 6
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4)).requires_grad_()
    drafted = paired(make_drafted(), num, table)
    plain, _ = judge(replace(drafted, selection=None), batch, LossOptions(1.0, 1.0, torch.float32, "lk_hybrid"), VOCAB)
    loss, sums = judge(drafted, batch, LossOptions(1.0, 1.0, torch.float32, "lk_hybrid"), VOCAB)
    wanted, accepted = 0.0, 0.0
    dists = batch.dist_probs.flatten(0, 1) / batch.dist_probs.flatten(0, 1).sum(-1, keepdim=True)
    for row, depth in (drafted.labels >= 0).nonzero().tolist():
        label = int(drafted.labels[row, depth])
        top, best = (drafted.states[row, depth] @ drafted.projections[depth].T).topk(num)
        scores = top + drafted.states[row, depth, 0] * table[drafted.selection.before[row, depth], best]
        whole = torch.zeros(VOCAB).scatter_(0, batch.dist_tokens.flatten(0, 1)[label], dists[label])
        one, alpha = loss_of("lk_hybrid", whole[best], scores.softmax(-1))
        wanted, accepted = wanted + one, accepted + float(alpha)
    torch.testing.assert_close(loss - plain, wanted.detach() / drafted.labels.numel(), rtol=1e-4, atol=1e-6)
    assert float(sums[5].sum()) == pytest.approx(accepted, rel=1e-4)
    torch.testing.assert_close(
        torch.autograd.grad(loss, table)[0],
        torch.autograd.grad(wanted / drafted.labels.numel(), table)[0],
        rtol=1e-4,
        atol=1e-6,
    )
