# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.runtime.text import REPLACEMENT, StopStrings, TextSink, TextStream


class ByteTokenizer:
    """One token a byte, as the worst byte-level tokenizer would have it; token 256 is special."""

    def decode(self, ids, skip_special_tokens=True):
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


TEXTS = st.text(alphabet=st.sampled_from("ab é€😀\n字"), max_size=40)


@given(TEXTS, st.lists(st.integers(1, 5), min_size=1, max_size=60))
@settings(max_examples=200, deadline=None)
def test_step_outputs_make_the_text_and_hold_no_half_character(text, cuts):
    tokens, stream, step_outputs, at = list(text.encode()), TextStream(ByteTokenizer()), [], 0
    for cut in [*cuts, len(tokens)]:
        step_outputs.append(stream.push(tokens[at : at + cut]))
        at += cut
    assert REPLACEMENT not in "".join(step_outputs)
    assert "".join(step_outputs) + stream.finish() == text


def test_broken_bytes_come_out_at_the_end_and_before_good_ones():
    stream = TextStream(ByteTokenizer())
    assert stream.push([0x61, 0xE2, 0x82]) == ""
    assert stream.push([0x62]) == "a" + REPLACEMENT + "b"
    assert stream.push([0xF0]) == ""
    assert stream.finish() == REPLACEMENT


def test_special_tokens_are_silent():
    stream = TextStream(ByteTokenizer())
    assert [stream.push([t]) for t in (0x61, 256, 0x62)] == ["a", "", "b"]
    assert stream.finish() == ""


@given(TEXTS, st.lists(st.sampled_from(["ab", "a\n", "字", "é€", "aa"]), min_size=1, max_size=3), st.integers(1, 7))
@settings(max_examples=200, deadline=None)
def test_nothing_of_a_stop_string_is_shown(text, stops, cut):
    stop, shown = StopStrings(stops), ""
    for at in range(0, len(text), cut):
        shown += stop.push(text[at : at + cut])
        if stop.found is not None:
            break
    ends = [text.find(s) for s in stops if s in text]
    if stop.found is None:
        assert not ends
        assert shown + stop.finish() == text
    else:
        # The first that is complete wins, so the cut is the first one within the text read so far.
        read = text[: at + cut]
        assert shown == read[: min(i for s in stops if (i := read.find(s)) >= 0)]


@pytest.mark.parametrize("group", [1, 2, 5, 50])
def test_a_sink_says_which_token_completed_the_stop_string(group):
    tokens, sink, used = list(b"def f():\n    pass\n\n\nclass"), TextSink(ByteTokenizer(), ["\n\n\n"]), 0
    for at in range(0, len(tokens), group):
        _, num, is_stopped = sink.push(tokens[at : at + group])
        used += num
        if is_stopped:
            break
    assert is_stopped
    assert (used, sink.text) == (20, "def f():\n    pass")
    assert sink.finish() == ""
