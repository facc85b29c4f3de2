# SPDX-License-Identifier: Apache-2.0
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from speccompile.bundle.bundle import Bundle
from speccompile.core.sampling import SamplingParams
from speccompile.errors import RuntimeFault
from tests.lab.decoding import fail_once
from tests.lab.engines import LETTERS, Letters, mock_engine
from tests.mock_lm import VOCAB, MockLM

TARGET = MockLM(seed=21)


def make_engine(tokenizer=LETTERS, **sizes):
    return mock_engine(TARGET, TARGET.blurred(22, 0.7), "draft_model", num_draft_tokens=4, tokenizer=tokenizer, **sizes)


def text(prompt, num):
    return Letters().decode(TARGET.greedy(Letters().encode(prompt).ids, num))


class Stripping(Letters):
    """A tokenizer whose decoder drops the first letter of a text."""

    def decode(self, ids, skip_special_tokens=True):
        return super().decode(ids)[1:]


def test_texts_are_what_tokens_add_to_the_prompts():
    made, wanted = make_engine(Stripping()), text("bc", 12)
    params = SamplingParams(max_new_tokens=12)
    assert made.generate(["bc"], params)[0].text == wanted
    assert "".join(step.text for step in made.stream("bc", params)) == wanted
    [stopped] = made.generate(["bc"], SamplingParams(max_new_tokens=12, stop=(wanted[:2],)))
    assert (stopped.text, stopped.finish_reason) == ("", "stop")


@pytest.fixture
def engine():
    return make_engine()


def test_texts_ids_and_lists_of_both_are_prompts(engine):
    params = SamplingParams(max_new_tokens=12)
    wanted = text("abc", 12)
    assert [g.text for g in engine.generate("abc", params)] == [wanted]
    assert [g.text for g in engine.generate([0, 1, 2], params)] == [wanted]
    both = engine.generate(["abc", "dab", [0, 1, 2], "c"], params)
    assert [g.text for g in both] == [wanted, text("dab", 12), wanted, text("c", 12)]
    assert both[0].json_from_generation().keys() == {"text", "tokens", "finish_reason", "stats"}
    assert engine.generate([], params) == []


def test_plain_and_speculative_give_the_same_and_count_their_steps(engine):
    params = SamplingParams(max_new_tokens=30)
    [fast], [plain] = engine.generate("abc", params), engine.generate("abc", params, speculative=False)
    assert fast.tokens == plain.tokens
    assert plain.stats["num_first_tokens"] == fast.stats["num_first_tokens"] == 1
    assert plain.stats["num_steps"] == 29 > fast.stats["num_steps"]
    assert plain.stats["num_draft_tokens"] == 0 and plain.stats["acceptance_by_position"] == []
    for stats in (fast.stats, plain.stats):
        assert 0 < stats["engine_ms"] < stats["step_ms"] <= stats["time_ms"]
        assert stats["prefill_ms"] + stats["step_ms"] <= stats["time_ms"] + 1e-6
        assert stats["outside_engine_ms"] == pytest.approx(stats["step_ms"] - stats["engine_ms"])
        assert stats["tokens_per_s"] == pytest.approx(29 / stats["step_ms"] * 1e3)  # 30 tokens, one with the prompt


def test_streams_show_the_text_that_generate_returns(engine):
    params = SamplingParams(max_new_tokens=25)
    stream = engine.stream("abc", params)
    steps = list(stream)
    assert "".join(step.text for step in steps) == text("abc", 25) == stream.generation.text
    assert [step.finish_reason for step in steps[:-1]] == [None] * (len(steps) - 1)
    assert steps[-1].finish_reason == "length"
    assert sum(step.num_accepted for step in steps) == stream.generation.stats["num_accepted"] > 0
    for step in steps:
        assert len(step.tokens) == step.num_accepted + 1
        assert step.is_bonus == (0 < step.num_accepted == step.num_draft_tokens)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_stop_string_cuts_the_text_and_ends_the_tokens(engine, batch_size):
    prompts = ["abc", "dab", "xx", "kkk"]
    for prompt in prompts:
        whole = text(prompt, 40)
        stop = whole[11:13]
        params = SamplingParams(max_new_tokens=40, stop=(stop, "never seen"))
        results = engine.generate([prompt, "b"], [params, SamplingParams(max_new_tokens=9)], batch_size=batch_size)
        at = whole.index(stop)
        assert (results[0].text, results[0].finish_reason) == (whole[:at], "stop")
        assert Letters().decode(results[0].tokens) == whole[: at + 2]
        assert results[1].text == text("b", 9)
        stream = engine.stream(prompt, params)
        assert "".join(step.text for step in stream) == whole[:at] == stream.generation.text


def test_eos_ends_unless_it_is_ignored():
    whole = TARGET.greedy([0, 1, 2], 30)
    eos = whole[10]
    engine = make_engine(eos=[eos])
    [result] = engine.generate("abc", SamplingParams(max_new_tokens=30))
    assert result.tokens == whole[: whole.index(eos) + 1] and result.finish_reason == "stop"
    [result] = engine.generate("abc", SamplingParams(max_new_tokens=30, ignore_eos=True))
    assert result.tokens == whole and result.finish_reason == "length"
    [result] = engine.generate("abc", SamplingParams(max_new_tokens=30, ignore_eos=True, stop_token_ids=(whole[4],)))
    assert result.tokens == whole[: whole.index(whole[4]) + 1]


def test_a_newer_run_ends_an_older_stream(engine):
    params = SamplingParams(max_new_tokens=20)
    old = engine.stream("abc", params)
    next(old)
    assert engine.generate("dab", params)[0].text == text("dab", 20)
    with pytest.raises(RuntimeFault, match=r"a newer run on the same engine.*speccompile.load_service"):
        next(old)
    assert engine.generate("abc", params)[0].text == text("abc", 20)


def test_a_second_thread_is_refused_while_a_step_runs(engine, monkeypatch):
    params, target, refused = SamplingParams(max_new_tokens=20), engine.verifier.engine, []

    def run_beside(feeds, first_slot=0):
        monkeypatch.undo()
        with ThreadPoolExecutor(1) as pool:
            refused.append(pool.submit(engine.generate, "dab", params).exception())
        return target.run(feeds, first_slot)

    monkeypatch.setattr(target, "run", run_beside)
    assert engine.generate("abc", params)[0].text == text("abc", 20)
    assert "a call while another thread decodes" in str(refused)
    assert engine.generate("dab", params)[0].text == text("dab", 20)


def test_an_error_inside_a_run_leaves_an_engine_that_works(engine, monkeypatch):
    params = SamplingParams(max_new_tokens=20)
    target = engine.verifier.engine
    fail_once(monkeypatch, target, 3)
    with pytest.raises(RuntimeFault, match="a fault"):
        engine.generate(["abc", "dab", "xx"], params)
    assert [g.text for g in engine.generate(["abc", "dab"], params)] == [text("abc", 20), text("dab", 20)]


NO_PROMPT = "; expected a text, or token ids"
WRONG_PROMPTS = [
    (["a", "a" * 65], r"prompt 1: got 65 tokens; expected at most 64"),
    (["a", ""], r"prompt 1: got no tokens; expected at least one"),
    ([[1], [2, VOCAB]], rf"prompt 1: got token {VOCAB}; expected ids from 0 to {VOCAB - 1}"),
    ([[1], [-1]], r"prompt 1: got token -1"),
    (["abc", "ab\udcff"], "prompt 1: got text with half of a surrogate pair; expected Unicode text"),
    ([None], f"prompt 0: got a NoneType{NO_PROMPT}"),
    (["abc", None], f"prompt 1: got a NoneType{NO_PROMPT}"),
    (None, f"prompt 0: got a NoneType{NO_PROMPT}"),
    ([1.5], f"prompt 0: got a float{NO_PROMPT}"),
    ([["a", "b"]], f"prompt 0: got a list{NO_PROMPT}"),
    ([b"abc"], f"prompt 0: got a bytes{NO_PROMPT}"),
    ((text for text in ("abc",)), f"prompt 0: got a generator{NO_PROMPT}"),
    ({"prompt": "abc"}, f"prompt 0: got a dict{NO_PROMPT}"),
]


@pytest.mark.parametrize(("prompts", "message"), WRONG_PROMPTS, ids=range(len(WRONG_PROMPTS)))
def test_a_wrong_prompt_is_named_before_anything_runs(engine, prompts, message):
    with pytest.raises(RuntimeFault, match=message):
        engine.generate(prompts)
    with pytest.raises(RuntimeFault, match=f"prompt 0: got a list{NO_PROMPT}"):
        engine.stream(["a", "b"])
    assert engine.verifier.engine.feeds_seen == []


def test_other_wrong_requests(engine):
    with pytest.raises(RuntimeFault, match="sampling: got 1 entries; expected 2"):
        engine.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(RuntimeFault, match="batch_size: got 4; expected 1 to 3"):
        engine.generate(["a", "b"], batch_size=4)
    engine.tokenizer = None
    with pytest.raises(RuntimeFault, match="got a text; expected token ids"):
        engine.generate("a")
    with pytest.raises(RuntimeFault, match="got stop strings; expected a bundle with a tokenizer"):
        engine.generate([[1]], SamplingParams(stop=("a",)))
    [result] = engine.generate([[0, 1]], SamplingParams(max_new_tokens=5))
    assert result.text == "" and result.tokens == TARGET.greedy([0, 1], 5)


def test_a_prompt_that_fills_the_cache_gives_one_token(engine):
    prompt = [i % VOCAB for i in range(64)]
    [result] = engine.generate([prompt], SamplingParams(max_new_tokens=9))
    assert (result.tokens, result.finish_reason) == (TARGET.greedy(prompt, 1), "cache_full")


def test_prompts_are_read_in_chunks_with_one_scored_node(engine):
    engine.generate([[i % VOCAB for i in range(30)]], SamplingParams(max_new_tokens=1))
    seen = engine.verifier.engine.feeds_seen
    assert [s["tokens"] for s in seen] == [(1, 7)] * 4 + [(1, 2)]
    assert [s.get("scored_nodes") for s in seen] == [(1, 1)] * 5
    engine.generate([[i % VOCAB for i in range(29)]], SamplingParams(max_new_tokens=2))
    later = seen[5:]  # the last chunk has two tokens at least
    assert [s["tokens"] for s in later] == [(1, 7)] * 3 + [(1, 6), (1, 2), (1, 1)]


def test_the_engine_says_what_it_is(engine):
    assert repr(engine) == "<SpecEngine, 3 slots of 64 tokens>"
    sizes = {"max_batch_size": 3, "max_seq_len": 64, "max_draft_nodes": 8}
    recipe = {"speculator": {"method": "ngram"}, "engine": {"backend": "reference", "device": "cpu", **sizes}}
    engine.bundle = Bundle(Path("bundles/x"), {"recipe": recipe})
    assert repr(engine) == "<SpecEngine of bundles/x: ngram, reference on cpu, 3 slots of 64 tokens>"


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.8}, [{"temperature": 0.8}], "greedy", ["greedy"], 0.8], ids=repr
)
def test_sampling_of_another_type_is_named(engine, sampling):
    for call in (engine.generate, engine.stream):
        with pytest.raises(RuntimeFault, match=r"sampling: got .*expected "):
            call("abc", sampling)


def test_a_closed_engine_frees_its_engines_and_refuses_every_call():
    with make_engine() as engine:
        begun = engine.stream("abc", SamplingParams(max_new_tokens=30))
        next(begun)
        [target, draft] = map(weakref.ref, engine.engines)
    engine.close()  # again
    calls = (lambda: engine.generate("abc"), lambda: engine.stream("abc"), engine.reset, lambda: next(begun))
    for call in calls:
        with pytest.raises(RuntimeFault, match=r"engine: got a call after close\(\); expected an open engine\. Load"):
            call()
    assert target() is None and draft() is None


def test_a_stop_string_may_be_given_alone(engine):
    assert SamplingParams(stop="x").stop == ("x",)
    whole = text("abc", 12)
    [result] = engine.generate("abc", SamplingParams(max_new_tokens=12, stop=whole[5]))
    assert (result.text, result.finish_reason) == (whole[: whole.index(whole[5])], "stop")


def test_arrays_are_prompts(engine):
    params = SamplingParams(max_new_tokens=5)
    [wanted] = engine.generate([0, 1, 2], params)
    assert engine.generate(np.array([0, 1, 2]), params)[0].tokens == wanted.tokens
    assert [g.tokens for g in engine.generate(np.array([[0, 1, 2]] * 2), params)] == [wanted.tokens] * 2
    assert engine.stream(np.array([0, 1, 2]), params) is not None
