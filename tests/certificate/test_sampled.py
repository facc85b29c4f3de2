# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from speccompile.certificate import chi_square
from speccompile.certificate.sampled import check_sampled, exact_rows, joint_of
from speccompile.core import acceptance
from speccompile.errors import RuntimeFault
from tests.certificate.certificate_lab import PROMPTS, TARGET, make_engine

pytestmark = pytest.mark.distribution
NUM = 500


def test_sampled_text_has_the_targets_distribution():
    told = list[tuple[int, int]]()
    check = check_sampled(make_engine(nodes=12), PROMPTS, NUM, lambda done, total: told.append((done, total)))
    assert check.status == "passed", check.facts
    assert told == sorted(told) and told[-1] == (4 * NUM, 4 * NUM) and told[0][0] < NUM  # of four runs
    runs = {run["run"]: run for run in check.facts["runs"]}
    assert set(runs) == {"plain", "the method's drafts", "planted chains", "planted trees"}
    assert all(run["num_cells"] > 15 and run["noticed_total_variation"] < 0.2 for run in runs.values())
    for name in ("the method's drafts", "planted chains", "planted trees"):
        assert runs[name]["num_accepted"] > 0.2 * NUM
    assert "is noticed with probability 90%" in check.summary


@pytest.mark.parametrize("wrong", ["the target's own", "not cut at zero", "the draft's"])
def test_a_wrong_residual_fails(monkeypatch, wrong):
    forms = {
        "the target's own": lambda target, draft: target,
        "not cut at zero": lambda target, draft: np.abs(target - draft) / np.abs(target - draft).sum(),
        "the draft's": lambda target, draft: draft,
    }
    monkeypatch.setattr(acceptance, "residual", forms[wrong])
    check = check_sampled(make_engine(nodes=12), PROMPTS, NUM)
    assert check.status == "failed"
    assert "planted chains" in check.summary and "planted trees" in check.summary


def test_a_run_that_fails_is_a_failed_check(monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeFault("engine target", "a broken step", "one that runs", "")

    monkeypatch.setattr("speccompile.certificate.sampled.decode_with", fail)
    check = check_sampled(make_engine(), PROMPTS, 4)
    assert check.status == "failed" and all("a broken step" in run["fault_raised"] for run in check.facts["runs"])


def test_the_exact_joint_is_that_of_the_model():
    rows = exact_rows(make_engine(), PROMPTS[0])
    joint = joint_of(rows)
    assert sum(joint.values()) == pytest.approx(1)
    logits = TARGET.logits(np.array(PROMPTS[0]))
    assert set(rows[()]) <= set(np.argsort(-logits)[:5].tolist())


@pytest.mark.parametrize("freedom", [1, 5, 26, 124])
def test_tails_and_powers_are_scipys(freedom):
    from scipy import stats

    for share in (0.01, 0.5, 1, 1.5, 4):
        wanted = stats.chi2.sf(share * freedom, freedom)
        assert chi_square.upper_tail(share * freedom, freedom) == pytest.approx(wanted, rel=1e-9)
    critical = chi_square.critical_value(freedom)
    assert critical == pytest.approx(stats.chi2.isf(chi_square.ALPHA, freedom), rel=1e-5)
    excess = chi_square.noncentrality(freedom)
    assert stats.ncx2.sf(critical, freedom, excess) == pytest.approx(chi_square.POWER, abs=1e-4)


def test_the_stated_power_is_that_of_simulated_counts():
    rng, cells, num = np.random.default_rng(2), 20, 600
    probs = rng.dirichlet(np.full(cells, 4.0))
    dist = {(i,): float(p) for i, p in enumerate(probs)}
    signs = np.where(np.arange(cells) % 2 > 0, 1.0, -1.0)
    effect = chi_square.fit({(i,): round(num * p) for i, p in enumerate(probs)}, dist).noticed_effect
    wrong = probs * (1 + effect * (signs - (probs * signs).sum()) / np.sqrt(1 - (probs * signs).sum() ** 2))
    assert (wrong > 0).all()
    noticed = failed = 0
    for _ in range(300):
        for dist_of, is_wrong in ((wrong, True), (probs, False)):
            counts = {(i,): int(n) for i, n in enumerate(rng.multinomial(num, dist_of / dist_of.sum())) if n}
            is_right = chi_square.fit(counts, dist).is_right
            noticed, failed = noticed + (is_wrong and not is_right), failed + (not is_wrong and not is_right)
    assert 0.8 < noticed / 300 < 0.97
    assert failed == 0


def test_texts_that_cannot_come_fail():
    found = chi_square.fit({(0,): 500, (7,): 1}, {(0,): 0.5, (1,): 0.5})
    assert found.p_value == 0 and not found.is_right


def test_a_single_rare_text_is_no_failure():
    dist = {(0,): 0.5, (1,): 0.4999, (2,): 0.0001}
    assert chi_square.fit({(0,): 499, (1,): 500, (2,): 1}, dist).is_right
