# SPDX-License-Identifier: Apache-2.0
"""speccompile verify: the certificate in a bundle, what shows it, and when it is stale."""

import json
import shutil

import pytest

from speccompile.bundle.bundle import read_bundle
from speccompile.bundle.format import CERTIFICATE, CERTIFICATE_PAGE, MANIFEST, digest_from_manifest
from speccompile.bundle.publish import certificate_facts, text_from_facts
from speccompile.certificate.sampled import check_sampled
from tests.certificate.certificate_lab import StrictEngine, WrongFollower, make_engine

PROMPTS = "".join(f'{{"prompt": {prompt}}}\n' for prompt in ([3, 1, 4, 1], [2, 7, 2], [9, 9, 8], [1, 2]))


@pytest.fixture
def bundle(run, recipe, tmp_path, monkeypatch):
    """Returns a folder, and a function that chooses the kind of target that it holds."""
    assert run("build", recipe, "-o", "b")[0] == 0
    kinds = [StrictEngine]

    def load(path):
        engine = make_engine(kinds[-1])
        engine.bundle = read_bundle(path)
        return engine

    monkeypatch.setattr("speccompile.certificate.verify.load", load)
    monkeypatch.setattr(
        "speccompile.certificate.verify.check_sampled",
        lambda engine, prompts, _, tell: check_sampled(engine, prompts, 90, tell),
    )
    (tmp_path / "prompts.jsonl").write_text(PROMPTS)
    return tmp_path / "b", kinds.append


def verify(run, *more, num_tokens=40):
    prompts = ("--prompts", "prompts.jsonl", "--num-tokens", num_tokens)
    return run("verify", "b", *prompts, "--without-checkpoint", *more)


@pytest.fixture(scope="module")
def verified(tmp_path_factory):
    """Returns a folder for verified bundles, and by kind of target what the command answered."""
    return tmp_path_factory.mktemp("verified"), {}


@pytest.fixture
def certify(bundle, run, verified):
    """Returns a function that verifies the bundle with a kind of target, once for all tests; it gives code and text."""
    (folder, choose), (kept, answers) = bundle, verified

    def certified(kind=StrictEngine):
        copy = kept / kind.__name__
        choose(kind)
        if kind not in answers:
            answers[kind] = verify(run)[:2]
            shutil.copytree(folder, copy)
        shutil.rmtree(folder)
        shutil.copytree(copy, folder)
        return answers[kind]

    return certified


def test_conversations_need_a_template(bundle, run, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}')
    code, _, err = verify(run)
    assert code == 7 and "prompts.jsonl:1 (messages)" in err and "no chat template" in err


def test_a_certificate_lies_in_the_bundle_and_is_shown(bundle, certify, run):
    folder, _ = bundle
    code, out = certify()
    assert code == 0, out
    assert "incomplete in" in out and "certificate.html" in out
    found = json.loads((folder / CERTIFICATE).read_text())
    assert found["verdict"] == "incomplete" and found["num_prompts"] == 4
    checks = {check["name"]: check for check in found["checks"]}
    assert checks["greedy"]["status"] == checks["faults"]["status"] == "passed"
    assert checks["reference"]["status"] == "not run" and "leave the checkpoint out" in checks["reference"]["summary"]
    assert checks["grammar"]["status"] == "not run" and "without a tokenizer" in checks["grammar"]["summary"]
    page = (folder / CERTIFICATE_PAGE).read_text()
    assert "sampled texts within a grammar" in page
    assert "Certificate: incomplete" in page and "full trees" in page and "<script" not in page
    read_bundle(folder)  # its files are none of the manifest's, and allowed
    code, out, _ = run("inspect", "b")
    assert code == 0 and "certificate incomplete" in out and "not run: " in out and "grammar" in out
    code, out, _ = run("inspect", "b", "--json")
    assert json.loads(out)["certificate"]["is_stale"] is False and json.loads(out)["foreign_files"] == []


@pytest.mark.usefixtures("bundle")
def test_checks_that_scored_too_few_drafts_are_not_run_and_have_an_exit_code(run):
    code, out, _ = verify(run, "--limit", "1", "--json", num_tokens=8)
    found = json.loads(out)
    assert code == 10 and found["verdict"] == "incomplete"
    checks = {check["name"]: check for check in found["checks"]}
    for name in ("greedy", "faults", "caches"):
        assert checks[name]["status"] == "not run" and not checks[name]["has_enough_drafts"]
        assert checks[name]["num_draft_tokens"] > 0 and checks[name]["least_draft_tokens_of_a_run"] == 100
    assert "too few drafts, drafts, batch 1: " in checks["greedy"]["summary"]
    assert "at least 100" in checks["greedy"]["summary"] and "more prompts or tokens" in checks["greedy"]["summary"]
    assert "num_draft_tokens" not in checks["tokenizer"]
    assert "certificate incomplete" in run("inspect", "b")[1]


def test_a_failed_check_has_an_exit_code(bundle, certify, run):
    folder, _ = bundle
    code, out = certify(WrongFollower)
    assert code == 9 and "failed" in out
    assert json.loads((folder / CERTIFICATE).read_text())["verdict"] == "failed"
    code, out, _ = verify(run, "--limit", "2", "--json")
    assert code == 9 and json.loads(out)["verdict"] == "failed"
    assert "failed: greedy, faults" in run("inspect", "b")[1]


def test_build_verifies_when_asked_and_replaces_a_verified_bundle(bundle, certify, run, recipe, monkeypatch):
    folder, _ = bundle
    monkeypatch.setattr(
        "speccompile.certificate.verify.find_prompts", lambda engine, given: [[3, 1, 4], [2, 7, 2], [9, 9, 8], [1, 2]]
    )
    monkeypatch.setattr("speccompile.certificate.verify.find_checkpoint", lambda bundle, folder: (None, "none here"))
    assert certify()[0] == 0 and (folder / CERTIFICATE).exists()
    code, out, err = run("build", recipe, "-o", "b")
    assert code == 0, err
    assert not (folder / CERTIFICATE).exists()
    code, out, err = run("build", recipe, "-o", "b", "--verify", "--json")
    assert code == 0, err
    assert json.loads(out)["certificate"]["checks"] and (folder / CERTIFICATE).exists()


def test_a_certificate_of_another_bundle_is_stale(bundle, certify, run):
    folder, _ = bundle
    assert certify()[0] == 0
    manifest = json.loads((folder / MANIFEST).read_text())
    for change, name in (
        (lambda m: m["files"]["report.html"].update(sha256="0" * 64), "report.html"),
        (lambda m: m.update(created_at="then"), MANIFEST),
    ):
        other = json.loads(json.dumps(manifest))
        change(other)
        other["digest"] = digest_from_manifest(other)
        facts = certificate_facts(folder, other)
        assert facts["is_stale"] and facts["changed_files"] == [name]
        assert text_from_facts(facts).startswith(f"stale, as {name} changed since; incomplete")
    (folder / "report.html").write_text("edited")
    code, out, _ = run("inspect", "b")
    assert code == 7 and "certificate stale" in out


def test_a_certificate_that_was_edited_is_not_believed(bundle, certify):
    folder, _ = bundle
    assert certify(WrongFollower)[0] == 9
    text = (folder / CERTIFICATE).read_text()
    (folder / CERTIFICATE).write_text(text.replace('"failed"', '"passed"'))
    manifest = read_bundle(folder).manifest
    facts = certificate_facts(folder, manifest)
    assert set(facts) == {"fault"} and "differ from its own digest" in text_from_facts(facts)
    (folder / CERTIFICATE).write_text("{")
    assert "fault" in certificate_facts(folder, manifest)
    (folder / CERTIFICATE).unlink()
    assert "speccompile verify" in text_from_facts(certificate_facts(folder, manifest))
