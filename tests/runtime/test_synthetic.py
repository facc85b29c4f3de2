# SPDX-License-Identifier: Apache-2.0
"""Synthetic acceptance keeps drafts at the stated rates, on real steps and caches."""

import random

import numpy as np
import pytest

from speccompile.core.sampling_params import SamplingParams, StructuredOutputs
from speccompile.core.tree import TokenTree
from speccompile.errors import BundleError, RuntimeFault
from speccompile.runtime.control import FixedLength
from speccompile.runtime.service import Service
from speccompile.runtime.synthetic import check_allowed, synthetic_note
from speccompile.runtime.verifier import Verifier
from tests.runtime.scheduler_lab import Bench
from tests.runtime.test_spec_engine import make_engine

RATES = (0.8, 0.5, 0.9)
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


def chi_square(counts, probs):
    expected = sum(counts) * np.array(probs)
    return float(((np.array(counts) - expected) ** 2 / expected).sum())


def test_accepted_lengths_follow_the_stated_rates():
    verifier, counts = make_engine(rates=RATES).verifier, [0] * 5
    tree = TokenTree.chain(np.arange(5)[None])
    for _ in range(4000):
        counts[len(verifier._kept(tree, 0))] += 1
    last = 0.8 * 0.5 * 0.9
    probs = [0.2, 0.8 * 0.5, 0.8 * 0.5 * 0.1, last * 0.1, last * 0.9]  # the last rate holds for the fourth draft too
    assert chi_square(counts, probs) < 18.5  # four degrees of freedom: one of a thousand exceeds it
    assert chi_square(counts, [0.2] * 5) > 100


def test_a_branch_is_kept_along_its_first_children():
    verifier = make_engine(rates=(1.0,)).verifier
    tree = TokenTree.tree([[5, 1, 2, 3, 4, 6]], [[-1, 0, 1, 0, 2, 2]])
    assert verifier._kept(tree, 0) == [1, 2, 4]
    verifier.rates = (0.0,)
    assert verifier._kept(tree, 0) == []


@pytest.mark.parametrize("kind", ["chain", "tree", "heads"])
@pytest.mark.parametrize("rates", [(0.0,), (1.0,), RATES])
def test_the_caches_hold_the_texts_that_come_out(kind, rates):
    bench = Bench(FixedLength(), kind=kind, rates=rates)
    for prompt in PROMPTS:
        bench.submit(prompt, sampling=SamplingParams(max_new_tokens=20), speculation="on")
        bench.step()
        bench.check()
    while bench.scheduler.has_work:
        bench.step()
        bench.check()
    stats = [bench.step_outputs[handle.number][0][-1].stats for handle in bench.handles]
    assert all(row["synthetic_acceptance"] == list(rates) for row in stats)
    accepted, drafted = (sum(row[key] for row in stats) for key in ("num_accepted", "num_draft_tokens"))
    assert drafted > 0 and (accepted > 0) == (rates[0] > 0)
    if kind == "chain" and rates == (1.0,):
        assert accepted == drafted


def test_outputs_are_marked_and_plain_texts_are_the_targets():
    params = SamplingParams(max_new_tokens=20)
    real, engine = make_engine(), make_engine(rates=RATES)
    [plain] = engine.generate([[1, 2, 3]], params, speculative=False)
    assert plain.tokens == real.generate([[1, 2, 3]], params)[0].tokens
    [text] = engine.generate([[1, 2, 3]], params)
    assert text.tokens != plain.tokens and text.stats["synthetic_acceptance"] == list(RATES)
    assert "synthetic_acceptance" not in real.generate([[1, 2, 3]], params)[0].stats
    with Service(engine) as service:
        assert service.stats()["synthetic_acceptance"] == list(RATES)
    with Service(real) as service:
        assert "synthetic_acceptance" not in service.stats()


def test_draws_are_seeded():
    texts = [make_engine(rates=RATES).generate(PROMPTS, SamplingParams(max_new_tokens=20)) for _ in range(2)]
    assert [one.tokens for one in texts[0]] == [one.tokens for one in texts[1]]
    other = make_engine(rates=RATES)
    other.verifier._random = random.Random(1)
    assert [one.tokens for one in other.generate(PROMPTS, SamplingParams(max_new_tokens=20))] != texts[0]


def test_what_cannot_be_synthetic_is_refused():
    engine = make_engine(rates=RATES)
    grammar = SamplingParams(structured_outputs=StructuredOutputs(regex="a*"))
    with pytest.raises(RuntimeFault, match=r"prompt 0: got structured_outputs with engine.synthetic_acceptance"):
        engine.verifier.may_draft("prompt 0", grammar)
    engine.verifier._compacts = False
    tree = TokenTree.tree([[5, 1, 2]], [[-1, 0, 0]])
    with pytest.raises(RuntimeFault, match=r"engine target: got trees with .* expected chains: its steps compact"):
        engine.verifier.score(tree, None)


def test_nothing_is_synthetic_unless_it_was_asked_for_twice():
    check_allowed("made", (), False)
    check_allowed("made", RATES, True)
    with pytest.raises(BundleError, match=r"made \(engine.synthetic_acceptance\): got \[0.8, 0.5, 0.9\]; expected dra"):
        check_allowed("made", RATES, False)
    assert type(make_engine().verifier) is Verifier and not Verifier.rates
    assert synthetic_note(()) == "" and "[0.8, 0.5, 0.9]" in synthetic_note(RATES)
