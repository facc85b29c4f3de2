# SPDX-License-Identifier: Apache-2.0
"""The certificate on compiled bundles: green as they are, red with defects that are planted into them."""

import json

import pytest

import speccompile
from speccompile.certificate.acceptance import FirstDrafts, check_acceptance, decode_shifted, is_better
from speccompile.certificate.caches import check_caches
from speccompile.certificate.checkpoint import check_tokenizer, open_reference
from speccompile.certificate.greedy import plain_texts
from speccompile.certificate.verify import STEPS, Options, Subject, run_checks
from tests.certificate.shifting import shift_drafts
from tests.e2e.conftest import MODELS, build_bundle

TEXTS = (
    "def read_lines(path):\n    with open(path) as",
    "class Queue:\n    def __init__(self):\n        self",
    "import ",
    "def main():\n    ",
    "for i in range(10):\n    for",
    "values = [1, 2, 3]\n",
)
NUM = 48


@pytest.fixture(scope="module")
def subject(pair):
    engine = speccompile.load(pair, verify=False)
    engine.controller = None
    return Subject(engine, engine.bundle, Options(TEXTS, num_tokens=NUM, num_samples=150))


def test_the_example_pair_passes_every_check(subject):
    checks = {check.name: check for check in run_checks(subject)}
    assert list(checks) == list(STEPS)
    assert {name: check.status for name, check in checks.items()} == dict.fromkeys(STEPS, "passed"), [
        check.summary for check in checks.values()
    ]
    assert checks["distance"].facts["kl"] < 1e-6 and checks["distance"].facts["top1"] == 1
    loop = checks["acceptance"].facts["loop"]
    assert loop["engine"] == loop["reference"]
    counts = {name: check.drafts for name, check in checks.items() if check.drafts is not None}
    assert set(counts) == {"greedy", "faults", "sampled", "grammar", "caches", "acceptance"}
    assert checks["caches"].facts["num_caches"] > 10 and checks["caches"].facts["row_deviation"] < 1e-3


def test_another_tokenizer_fails(subject, monkeypatch):
    from tokenizers import Tokenizer

    text = json.loads(subject.engine.tokenizer.to_str())
    vocab = text["model"]["vocab"]
    first, second = [token for token, index in vocab.items() if index in (300, 301)]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    monkeypatch.setattr(subject.engine, "tokenizer", Tokenizer.from_str(json.dumps(text)))
    check = check_tokenizer(subject.engine, MODELS / "pycode-16m")
    assert check.status == "failed" and check.facts["num_entries_differing"] == 2
    assert check_tokenizer(subject.engine, None).status == "not run"


def test_rows_that_are_not_moved_fail(subject, monkeypatch):
    monkeypatch.setattr(subject.engine.verifier.engine, "compact", lambda lengths, path: None)
    check = check_caches(subject.engine, subject.prompts, subject.plain)
    assert check.status == "failed" and check.facts["row_deviation"] > 0.1


@pytest.fixture(scope="module")
def eagle(e2e_folder):
    """Returns a bundle of a tiny target with an EAGLE-3 drafter, and the target in torch."""
    import torch

    from tests.speculators import eagle_lab as lab

    target = lab.write_target(e2e_folder / "certified_target")
    reference, why = open_reference(target)
    assert reference is not None, why
    embeddings = reference.target.parts(torch.zeros(lab.VOCAB)).embeddings
    drafter = lab.fit_eagle3(target, lab.random_eagle3(lab.config_of(draft_vocab_size=34), seed=1), embeddings)
    folder = lab.write_eagle3(e2e_folder / "certified_eagle", drafter)
    sizes = {"layers": list(lab.STREAMS), "draft_vocab_size": 34, "intermediate_size": 48}
    (folder / "training.json").write_text(json.dumps({"plan": {"method": "eagle3", "heads": sizes}}))
    bundle = build_bundle(
        e2e_folder,
        "certified",
        f"target: {{model: {target}}}\nspeculator: {{method: eagle3, model: {folder}}}\n"
        "engine: {max_batch_size: 4, max_seq_len: 90, max_draft_nodes: 8, threads: 1}\n",
    )
    engine = speccompile.load(bundle, verify=False)
    prompts = [prompt for prompt in lab.PROMPTS if len(prompt) > 1]
    engine.controller = None
    return engine, prompts, plain_texts(engine, prompts, 40), reference


def test_drafts_of_compiled_graphs_are_accepted_as_those_of_the_network(eagle):
    check = check_acceptance(*eagle, "")
    assert check.status == "passed", check.summary
    assert check.facts["loop"]["engine"]["length"] > 1.3


def test_drafts_that_are_shifted_by_one_fail_in_the_loop_too(eagle, monkeypatch):
    load = speccompile.load

    def load_shifted(*arguments, **options):
        engine = load(*arguments, **options)
        shift_drafts(engine)
        return engine

    monkeypatch.setattr("speccompile.certificate.acceptance.load", load_shifted)
    check = check_acceptance(*eagle, "")
    own, *others = (FirstDrafts.of(run) for run in decode_shifted(*eagle[:2], 40).values())
    assert check.status == "failed" and all(is_better(own, other) for other in others)  # the loop alone sees it


def test_features_of_other_layers_fail(eagle, monkeypatch):
    load = speccompile.load

    def load_wrong(*arguments, **options):
        engine = load(*arguments, **options)
        [fusion] = [e for e in engine.engines if any(t.name == "hidden.1" for t in e.spec.inputs)]
        run = fusion.run
        others = {"hidden.1": "hidden.2", "hidden.2": "hidden.3", "hidden.3": "hidden.1"}
        monkeypatch.setattr(fusion, "run", lambda feeds, first_slot=0: run({n: feeds[others[n]] for n in others}))
        return engine

    monkeypatch.setattr("speccompile.certificate.acceptance.load", load_wrong)
    check = check_acceptance(*eagle, "")
    assert check.status == "failed", check.summary


def test_the_loop_along_the_targets_own_text_is_the_loop(eagle, monkeypatch):
    """As a bundle whose texts differ from float32's is compared: by the text that it wrote."""
    from speccompile.certificate import acceptance

    own = check_acceptance(*eagle, "").facts["loop"]["reference"]
    monkeypatch.setattr(acceptance, "is_exact", lambda manifest: False)
    along = check_acceptance(*eagle, "")
    assert along.facts["loop"]["reference"] == own and along.facts["loop"]["bound"] == 0.15
    engine, prompts, texts, reference = eagle
    others = [[(token + 1) % 30 for token in text] for text in texts]
    strange = check_acceptance(engine, prompts, others, reference, "").facts["loop"]["reference"]
    assert sum(strange["kept"]) < sum(own["kept"]) and sum(strange["tried"]) > 0
