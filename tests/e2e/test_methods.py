# SPDX-License-Identifier: Apache-2.0
"""Every method, with chains and trees, at batch 1, 3 and 8 and on the reference backend: the text is the target's."""

import asyncio
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from speccompile.core import registry
from speccompile.core.jobs import StepCosts
from speccompile.core.sampling import SamplingParams
from speccompile.core.sampling_params import StructuredOutputs
from speccompile.drafting.acceptance import AcceptanceEstimate
from speccompile.runtime.control import FixedLength
from speccompile.runtime.grammars import Grammars
from speccompile.runtime.requests import Request
from speccompile.runtime.scheduler import decode
from speccompile.runtime.sequences import SequenceBatch
from speccompile.runtime.service import Service
from tests.backends.tensorrt.profile_watch import ProfileWatch
from tests.certificate.shifting import check_that_a_shift_shows
from tests.e2e.conftest import SLOTS
from tests.e2e.test_method_chats import talk
from tests.method_rows import MAX_NODES, MAX_SEQ, ROWS, forms, method_of
from tests.runtime.control_lab import Limits
from tests.runtime.grammar_lab import SCHEMAS, Pieces, is_valid, watch_scored

BACKENDS = ("onnxruntime", "reference")
BATCHES = (1, 3, 8)


def prompts():
    from tests.speculators.eagle_lab import PROMPTS

    return [*PROMPTS, [4, 4, 2]]


def params(num):
    return [SamplingParams(max_new_tokens=num + 2 * i, ignore_eos=True) for i in range(len(prompts()))]


@pytest.fixture(scope="module")
def plain(lab):
    """Returns a function: parameters of the first prompts -> the target's own texts, decoded once for all methods."""
    engine, known = lab("ngram", "chain", "onnxruntime"), {}

    def decode_plain(asked):
        if (key := tuple(asked)) not in known:
            results = engine.generate(prompts()[: len(asked)], asked, speculative=False, batch_size=1)
            known[key] = [r.tokens for r in results]
        return known[key]

    return decode_plain


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("method", "form"), forms())
def test_greedy_text_equals_plain_decoding(lab, plain, method, form, backend):
    engine = lab(method, form, backend)
    # The reference evaluator is slow: shorter and fewer texts, in one batch of which sequences leave at once.
    num, some, batches = (30, len(prompts()), BATCHES) if backend == "onnxruntime" else (4, 5, (3,))
    for batch_size in batches:
        results = engine.generate(prompts()[:some], params(num)[:some], batch_size=batch_size)
        wanted = [text[: num + 2 * i] for i, text in enumerate(plain(params(30))[:some])]
        assert [r.tokens for r in results] == wanted, f"batch {batch_size}"
        if backend == "onnxruntime":
            assert sum(r.stats["num_accepted"] for r in results) >= 20


@pytest.mark.parametrize(("method", "form"), forms())
def test_texts_that_fill_the_cache_end_as_plain_decoding_does(lab, plain, method, form):
    engine = lab(method, form, "onnxruntime")
    asked = [SamplingParams(max_new_tokens=500, ignore_eos=True)] * len(prompts())
    fast = engine.generate(prompts(), asked, batch_size=3)
    assert [r.tokens for r in fast] == plain(asked)
    assert {r.finish_reason for r in fast} == {"cache_full"}


@pytest.mark.parametrize(("method", "form"), forms())
def test_the_seed_alone_decides_sampled_text(lab, method, form):
    engine = lab(method, form, "onnxruntime")
    heats = (1.0, 0.0, 1.3, 0.6, 0.9, 0.0, 1.1, 0.7, 1.0)
    asked = [
        SamplingParams(max_new_tokens=16, temperature=t, top_p=0.9 if i % 2 else 1.0, seed=i, ignore_eos=True)
        for i, t in enumerate(heats)
    ]
    alone = [r.tokens for r in engine.generate(prompts(), asked, batch_size=1)]
    for batch_size in BATCHES[1:]:
        assert [r.tokens for r in engine.generate(prompts(), asked, batch_size=batch_size)] == alone


@pytest.mark.parametrize(("method", "form"), [pair for pair in forms() if pair[0] in ("ngram", "eagle3", "medusa")])
def test_the_first_token_that_comes_with_the_prompt_is_that_of_a_step(lab, monkeypatch, method, form):
    engine = lab(method, form, "onnxruntime")
    asked = [
        SamplingParams(max_new_tokens=6, temperature=0.3 * i, top_p=0.9 if i % 2 else 1.0, seed=i, ignore_eos=True)
        for i in range(len(prompts()))
    ]
    runs = {}
    for reads in (True, False):
        monkeypatch.setattr(engine.verifier, "may_read_last", reads)
        runs[reads] = engine.generate(prompts(), asked, speculative=False, batch_size=3)
    assert [r.tokens for r in runs[True]] == [r.tokens for r in runs[False]]
    assert sum(r.stats["num_first_tokens"] for r in runs[True]) == sum(len(p) > 1 for p in prompts()) > 3
    assert sum(r.stats["num_first_tokens"] for r in runs[False]) == 0


def decode_with_limits(engine, asked, batch_size, seed):
    """Returns texts of `prompts()` with random draft limits, as a clock could set them, and invariant drafts."""
    rng = np.random.default_rng(seed)
    limits = Limits((None, 0, 1, 2, None)[rng.integers(5)] for _ in itertools.count())
    waiting = [engine.make_sequence(i, p, a, False) for i, (p, a) in enumerate(zip(prompts(), asked, strict=True))]
    engine.reset()
    batch = SequenceBatch(waiting, batch_size, is_invariant=True)
    steps = decode(engine.verifier, engine.proposer, batch, planner=limits)
    num_accepted = sum(step.num_accepted for some in steps for step in some)
    return [sequence.tokens[sequence.num_prompt :] for sequence in waiting], num_accepted


@pytest.mark.parametrize(("method", "form"), forms())
def test_sampled_text_is_plain_text_where_no_text_may_depend_on_drafts(lab, plain, method, form):
    engine = lab(method, form, "onnxruntime")
    dists = ((0.5, 0, 1.0), (1.0, 0, 1.0), (1.5, 5, 1.0), (0.0, 0, 1.0), (1.0, 0, 0.8), (0.8, 8, 0.9))
    asked = [
        SamplingParams(max_new_tokens=14 + i, temperature=t, top_k=k, top_p=p, seed=50 + i, ignore_eos=True)
        for i, (t, k, p) in enumerate((dists * 2)[: len(prompts())])
    ]
    wanted = plain(asked)
    texts, num_accepted = decode_with_limits(engine, asked, batch_size=3, seed=3)
    assert texts == wanted
    assert num_accepted >= 5


@pytest.mark.parametrize(("method", "form"), forms())
def test_the_controller_decides_where_sampled_text_does_not_depend_on_drafts(lab, plain, monkeypatch, method, form):
    engine = lab(method, form, "onnxruntime")
    asked = [SamplingParams(max_new_tokens=14, temperature=1.0, seed=i, ignore_eos=True) for i in range(len(prompts()))]
    may_draw, numbers = engine.proposer.may_draw, itertools.count()
    monkeypatch.setattr(engine, "controller", Limits((None, 0, 2)[number % 3] for number in numbers))
    texts = [r.tokens for r in engine.generate(prompts(), asked, batch_size=3)]
    assert (texts == plain(asked), next(numbers) > 14) == (not may_draw, not may_draw)


TOO_DEAR = StepCosts(((1, 10.0), (2, 1e4), (64, 1e6)))  # no draft pays, whatever is accepted


@pytest.mark.parametrize("limit", [None, 0, 2])
@pytest.mark.parametrize(("method", "form"), forms())
def test_on_drafts_in_every_step_that_may_whatever_it_costs(lab, plain, method, form, limit):
    """Also beside sequences with `auto`, and where a planner drafts for these or not."""
    dear = lab(method, form, "onnxruntime", TOO_DEAR)
    num_drafts = {"on": [], "auto": []}
    asked = [SamplingParams(max_new_tokens=14, temperature=0.8 * (i % 2), seed=i, ignore_eos=True) for i in range(6)]
    waiting = [dear.make_sequence(i, p, a, False) for i, (p, a) in enumerate(zip(prompts(), asked, strict=False))]
    for sequence in waiting[:4]:
        sequence.speculation = "on"
    wanted = plain(asked)
    dear.reset()
    batch = SequenceBatch(waiting, 3, is_invariant=True)
    for steps in decode(dear.verifier, dear.proposer, batch, planner=FixedLength(limit)):
        for step in steps:
            sequence = waiting[step.output_index]
            # The first token comes with the prompt, or in a step without a state to draft from.
            is_first = len(sequence.tokens) - len(step.tokens) == sequence.num_prompt
            if sequence.max_drafts and not is_first:
                num_drafts[sequence.speculation].append(step.num_draft_tokens)
    assert [sequence.tokens[sequence.num_prompt :] for sequence in waiting] == wanted
    if method in ("ngram", "suffix"):  # where nothing in the text matches, nothing can be drafted
        assert np.count_nonzero(num_drafts["on"]) > 10
    else:
        assert min(num_drafts["on"]) >= 1, num_drafts["on"]
        assert np.mean(num_drafts["on"]) > (1.5 if limit == 2 else 2)
    assert bool(num_drafts["auto"]) == (limit != 0)


def test_every_method_has_a_row_or_a_lab_of_its_own():
    """`gemma4_assistant` needs a target of its own, and `none` drafts nothing."""
    assert {method_of(name).name for name in ROWS} == set(registry.METHODS) - {"gemma4_assistant", "none"}


@pytest.mark.parametrize(("method", "form"), forms())
def test_the_check_of_acceptance_fails_where_every_draft_is_shifted_by_one(lab, method, form):
    check_that_a_shift_shows(lab(method, form, "onnxruntime"), prompts(), 40)


@pytest.mark.parametrize(("method", "form"), forms())
def test_drafts_after_steps_without_drafts_are_those_of_a_fresh_prompt(lab, monkeypatch, method, form):
    """Plain steps between steps with drafts take nothing from a draft that reads features of the target."""
    engine = lab(method, form, "onnxruntime")
    # Siblings are in the order of their estimated acceptance: here that of their confidences, as nothing is learned.
    monkeypatch.setattr(AcceptanceEstimate, "factors", lambda self, num: [1.0] * num)
    found = {}
    # Which of several drafters is taken depends on what was accepted before: there the one with graphs is watched.
    watched = next((d.proposer for d in getattr(engine.proposer, "drafters", ()) if d.costs), engine.proposer)
    propose = watched.propose

    def proposing(batch):
        tree = propose(batch)
        for row, sequence in enumerate(batch.sequences):
            if tree.num_nodes[row] > 1:
                found.setdefault(tuple(sequence.tokens), int(tree.tokens[row, 1]))
        return tree

    watched.propose = proposing
    asked = [SamplingParams(max_new_tokens=24, ignore_eos=True)] * 3
    engine.reset()
    waiting = [engine.make_sequence(i, p, a, False) for i, (p, a) in enumerate(zip(prompts(), asked, strict=False))]
    batch = SequenceBatch(waiting, 3)
    limits = Limits(itertools.cycle((None, 0, None, 0, 0)))
    list(decode(engine.verifier, engine.proposer, batch, planner=limits))
    later = {text: draft for text, draft in found.items() if len(text) < MAX_SEQ - 4}
    found.clear()
    # The last token of each text is the one that reading the others gives.
    anew = [list(text[:-1]) for text in later if len(text) > 1]
    engine.generate(anew, SamplingParams(max_new_tokens=3, ignore_eos=True), batch_size=SLOTS)
    both = [text for text in later if text in found]
    assert len(both) >= 8
    assert [text for text in both if found[text] != later[text]] == []


@pytest.mark.parametrize(("method", "form"), forms())
def test_every_step_fits_a_profile_of_the_plans_that_tensorrt_would_run(lab, monkeypatch, method, form):
    engine = lab(method, form, "onnxruntime")
    watches = [ProfileWatch(one, SLOTS, MAX_NODES + 1) for one in engine.engines]
    for one, watch in zip(engine.engines, watches, strict=True):
        monkeypatch.setattr(one, "run", watch.run)
    for batch_size in BATCHES:
        asked = [SamplingParams(30, temperature=t, seed=3, ignore_eos=True) for t in (0.0, 0.8, 0.0)]
        results = engine.generate(prompts(), (asked * len(prompts()))[: len(prompts())], batch_size=batch_size)
        assert sum(r.stats["num_accepted"] for r in results) > 0
    talk(engine, keeps=True, at_once=True)
    engine.reset()  # drafts that are off for a while, and read what they have missed
    asked = [SamplingParams(MAX_SEQ, temperature=t, seed=3, ignore_eos=True) for t in (0.0, 0.8, 0.0)]
    waiting = [engine.make_sequence(i, p, a, False) for i, (p, a) in enumerate(zip(prompts(), asked, strict=False))]
    limits = Limits(itertools.cycle((*[0] * 30, None, None, 0, None)))
    list(decode(engine.verifier, engine.proposer, SequenceBatch(waiting, 3), planner=limits))
    assert [fault for watch in watches for fault in watch.faults] == []
    assert max(dict(shape)["nodes"] for shape in watches[0].shapes) > 2
    assert all(watch.shapes for watch in watches)


@pytest.mark.distribution
# The seed is fixed; p < 1e-4 happens by chance once in ten thousand choices of it.
@pytest.mark.parametrize("is_wrong", [False, True])
def test_two_tokens_after_drafts_drawn_from_masks_follow_the_targets_distribution(lab, is_wrong):
    """Rows of masks give distributions over the draft's vocabulary; those of other tokens are noticed."""
    from tests.e2e.two_tokens import exact_dist, fit_p_value

    engine, num, prompt, heat, top_k = lab("peagle", "chain", "onnxruntime"), 600, prompts()[0], 0.8, 6
    if is_wrong:
        propose = engine.proposer.propose

        def shifted(batch):
            tree = propose(batch)
            return tree if tree.draft_probs is None else replace(tree, draft_probs=np.roll(tree.draft_probs, 1, axis=2))

        engine.proposer.propose = shifted
    asked = [
        SamplingParams(max_new_tokens=3, temperature=heat, top_k=top_k, seed=s, ignore_eos=True) for s in range(num)
    ]
    results = engine.generate([prompt] * num, asked, batch_size=8)
    p_value = fit_p_value(results, exact_dist(lab.target, prompt, heat, top_k))
    assert (p_value < 1e-4) == is_wrong, p_value
    if not is_wrong:
        assert 20 < sum(r.stats["num_accepted"] for r in results) < sum(r.stats["num_draft_tokens"] for r in results)


FORTY = [b"</s>", *(piece.encode() for piece in ('{"', '":', '","', '"}', '"', "{", "}", "[", "]", ",", ":"))]
FORTY += [b"true", b"false", b"null", *(bytes([c]) for c in b"0123456789abcdeghijklmop")]
FORTY += [b"ab"]
LETTERS = "abcdeghijklmop"
WRITTEN = {  # patterns of the thirty schemas, in these letters
    "^[a-z]{1,6}$": "^[a-p]{1,3}$",
    "^[A-Z]{2}-[0-9]{3}$": "^[a-d]{2}e[0-9]{3}$",
    "^20[0-9]{2}-[01][0-9]$": "^20[0-9]{2}e[01][0-9]$",
}


def in_forty(schema):
    """Returns a schema with names, words and patterns that the forty tokens can write, in at most 48 of them."""
    if isinstance(schema, list):
        return [in_forty(part) for part in schema]
    if isinstance(schema, str):
        return "".join(LETTERS[ord(letter) % len(LETTERS)] for letter in schema)[:3]
    if not isinstance(schema, dict):
        return schema
    names = dict(zip(schema.get("properties", ()), LETTERS, strict=False))
    read = {
        "properties": lambda parts: {names[name]: in_forty(part) for name, part in parts.items()},
        "required": lambda parts: [names[name] for name in parts],
        "$defs": lambda parts: {name: in_forty(part) for name, part in parts.items()},
        "pattern": WRITTEN.__getitem__,
        **dict.fromkeys(("anyOf", "items", "enum", "const"), in_forty),
    }
    return {key: read.get(key, lambda value: value)(value) for key, value in schema.items()}


class Forty(Pieces):
    """A tokenizer that writes JSON with the forty tokens of the target."""

    tokens, ids = FORTY, {token: at for at, token in enumerate(FORTY) if at}

    def decode(self, ids, skip_special_tokens=True):
        return b"".join(FORTY[i] for i in ids if i).decode()


@pytest.fixture(scope="module")
def structured(lab):
    """Returns thirty prompts, schemas, parameters, and greedy texts without drafts."""
    pytest.importorskip("llguidance")
    schemas = [in_forty(schema) for schema in SCHEMAS]
    starts = [[4, 1 + i % 20] for i in range(len(schemas))]
    asked = [
        SamplingParams(50, seed=i, stop_token_ids=(0,), structured_outputs=StructuredOutputs(json=schema))
        for i, schema in enumerate(schemas)
    ]
    engine = lab("ngram", "chain", "onnxruntime")
    engine.grammars = Grammars(Forty(), len(FORTY), [0])
    alone = engine.generate(starts, asked, speculative=False, batch_size=SLOTS)
    return starts, schemas, asked, [result.tokens for result in alone]


@pytest.mark.parametrize(("method", "form"), forms())
def test_texts_are_of_their_schemas_and_no_draft_is_scored_that_a_grammar_refuses(
    lab, structured, monkeypatch, method, form
):
    """Thirty schemas at temperature 0 and 1, asked for at once."""
    engine, (starts, schemas, asked, alone) = lab(method, form, "onnxruntime"), structured
    asked = [replace(one, temperature=heat) for heat in (0.0, 1.0) for one in asked]
    engine.grammars = Grammars(Forty(), len(FORTY), [0])
    watch_scored(engine.verifier, monkeypatch)

    async def everybody(service):
        requests = (Request(start, one, speculation="on") for start, one in zip(starts * 2, asked, strict=True))
        return [answer for (answer,) in await asyncio.gather(*map(service.generate, requests))]

    service = Service(engine)
    service.start()
    try:
        answers = asyncio.run(everybody(service))
    finally:
        service.close()
    for answer, schema in zip(answers, schemas * 2, strict=True):
        text = Forty().decode(answer.tokens)
        assert (answer.finish_reason, answer.error) == ("stop", None), (schema, text)
        assert is_valid(json.loads(text), schema), (schema, text)
    assert sum(answer.stats["num_accepted"] for answer in answers) > 0
    assert [answer.tokens for answer in answers[: len(alone)]] == alone
