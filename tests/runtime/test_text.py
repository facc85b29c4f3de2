# SPDX-License-Identifier: Apache-2.0
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from speccompile.core.sampling import SamplingParams
from speccompile.errors import RuntimeFault
from speccompile.runtime.text import (
    REPLACEMENT,
    WINDOW,
    StopStrings,
    TextSink,
    TextStream,
    bytes_by_letter,
    text_of_token,
    text_of_tokens,
)


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


def test_broken_bytes_come_out_before_good_ones_and_no_half_character_at_the_end():
    stream = TextStream(ByteTokenizer())
    assert stream.push([0x61, 0xE2, 0x82]) == "a"
    assert stream.push([0x62]) == REPLACEMENT + "b"
    assert stream.push([0xF0]) == ""
    assert stream.finish() == ""


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


def llama_decoder() -> decoders.Decoder:
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence(parts)


def metaspace(scheme: str) -> decoders.Decoder:
    return decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)])


WORDS = [
    "\u2581",
    "\u2581The",
    "\u2581is",
    "\u2581Paris",
    "Paris",
    "\u2581\u2581\u2581\u2581",
    ",",
    "return",
    REPLACEMENT,
]
PARTS = [b" \xe2\x80", b"\xe0\xa4", b"\xbe\xe0\xa4", REPLACEMENT.encode(), b" the", b"\xa9\xc3", b"\xff\xe5"]


def make_tokenizer(decoder: decoders.Decoder | None) -> Tokenizer:
    """Returns a byte-fallback vocabulary of `WORDS`, or a byte-level one of `PARTS` where no decoder is given."""
    letters = {byte: letter for letter, byte in bytes_by_letter().items()}
    if decoder is None:
        names = [*letters.values(), *("".join(letters[byte] for byte in part) for part in PARTS)]
    else:
        names = [*(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    tokenizer = Tokenizer(models.BPE({name: at for at, name in enumerate(names)}, []))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoders.ByteLevel() if decoder is None else decoder
    return tokenizer


DECODERS = {"strip": llama_decoder(), **{name: metaspace(name) for name in ("first", "always", "never")}, "bytes": None}
TOKENIZERS = {name: make_tokenizer(decoder) for name, decoder in DECODERS.items()}


def ids_of(tokenizer: Tokenizer, *names: str) -> list[int]:
    return [tokenizer.token_to_id(name) for name in names]


def streamed(tokenizer, prompt, tokens, size, skips=True):
    stream = TextStream(tokenizer, skips, prompt)
    parts = [stream.push(tokens[at : at + size]) for at in range(0, len(tokens), size)]
    return "".join(parts) + stream.finish()


def random_tokens(tokenizer: Tokenizer, rng: random.Random, kind: str) -> list[int]:
    """Returns tokens of valid text in single bytes with words between them (`text`), or any."""
    num, words = tokenizer.get_vocab_size(), list(range(256, tokenizer.get_vocab_size()))
    if kind == "any":
        return [rng.randrange(num) for _ in range(rng.randrange(40))]
    first = "<0x{:02X}>".format if tokenizer.token_to_id("<0x00>") is not None else None
    names = {byte: letter for letter, byte in bytes_by_letter().items()}
    found = []
    for _ in range(rng.randrange(25)):
        found += ids_of(
            tokenizer, *(first(byte) if first else names[byte] for byte in rng.choice("字é😀a b\n").encode())
        )
        found += [rng.choice(words)] * (first is not None and rng.random() < 0.3)
    return found


@pytest.mark.parametrize("name", TOKENIZERS)
def test_text_is_what_tokens_add_to_the_prompts(name):
    """Also after prompts of special tokens alone, in long runs of bytes and beside bytes that are no text."""
    tokenizer, rng, num_compared = TOKENIZERS[name], random.Random(1), 0
    [special] = ids_of(tokenizer, "<s>")
    for trial in range(60):
        tokens = random_tokens(tokenizer, rng, "any" if trial % 2 else "text")
        prompt = [special] * rng.choice([1, 40]) + random_tokens(tokenizer, rng, "text" if trial % 3 else "any")
        texts = {streamed(tokenizer, prompt, tokens, size) for size in (1, 2, 3, 5, 100)}
        assert texts == {text_of_tokens(tokenizer, tokens, prompt)}
        whole, before = tokenizer.decode(prompt + tokens), tokenizer.decode(prompt)
        wanted = whole.removeprefix(before)
        # A byte that does not fit breaks a whole run, what was streamed of it too: those texts are as good as any.
        if whole.startswith(before) and (name == "bytes" or REPLACEMENT not in wanted):
            [text] = texts
            assert text in (wanted, wanted.removesuffix(REPLACEMENT))
            num_compared += 1
    assert num_compared > 10


@pytest.mark.parametrize("size", [1, 2, 9])
@pytest.mark.parametrize(
    ("name", "prompt", "tokens", "text"),
    [
        ("strip", ["\u2581The", "\u2581is"], ["\u2581Paris"], " Paris"),
        ("strip", ["<s>"], ["\u2581Paris"], "Paris"),
        ("strip", ["\u2581The", *["<s>"] * 50], ["\u2581Paris"], " Paris"),
        (
            "strip",
            ["\u2581The"],
            ["<s>", "\u2581\u2581\u2581\u2581", "\u2581", "return", "\u2581is"],
            " " * 5 + "return is",
        ),
        ("strip", ["\u2581"], ["<0x20>", "<0x20>", "\u2581is"], "   is"),
        ("strip", ["\u2581The", "<0xE5>", "<0xAD>"], ["<0x97>", ","], "字,"),
        ("strip", ["\u2581The", "<0xE5>", "<0xAD>"], ["Paris"], "Paris"),
        ("first", ["\u2581The"], ["\u2581Paris"], " Paris"),
        ("always", ["\u2581The"], ["\u2581Paris"], " Paris"),
        ("always", [], ["\u2581Paris", "\u2581is"], "Paris is"),
        ("never", ["<s>"], ["\u2581Paris"], " Paris"),
    ],
)
def test_the_first_space_stays(name, prompt, tokens, text, size):
    tokenizer = TOKENIZERS[name]
    assert streamed(tokenizer, ids_of(tokenizer, *prompt), ids_of(tokenizer, *tokens), size) == text


def test_a_sink_knows_the_prompt():
    tokenizer = TOKENIZERS["strip"]
    prompt, tokens = ids_of(tokenizer, "\u2581The"), ids_of(tokenizer, "\u2581is", "\u2581Paris", ",")
    sink = TextSink(tokenizer, [" is"], prompt=prompt)
    assert sink.push(tokens) == ("", 1, True)
    shown = TextSink(tokenizer, [], frozenset(), prompt=prompt)
    assert shown.push(tokens + ids_of(tokenizer, "<s>")) == (" is Paris,<s>", 4, False)


@pytest.mark.parametrize(
    ("name", "tokens", "text"),
    [
        ("strip", ["\u2581is", "<0xE5>", "<0xAD>"], " is"),
        ("strip", ["<0xE5>", "<0xAD>", "<0x97>", "<0xE5>"], "字"),
        ("strip", ["\u2581is", REPLACEMENT], " is" + REPLACEMENT),
        ("strip", ["<0xFF>"], REPLACEMENT),
        ("bytes", ["Ġâ\u0122"], " "),
        ("bytes", ["a", "å", "Ń"], "a"),
        ("bytes", ["ï¿½"], REPLACEMENT),
        ("bytes", ["ÿå"], REPLACEMENT),
    ],
)
@pytest.mark.parametrize("size", [1, 9])
def test_a_text_ends_before_a_character_that_is_not_whole(name, tokens, text, size):
    tokenizer = TOKENIZERS[name]
    prompt = ids_of(tokenizer, "\u2581The" if name == "strip" else "a")
    assert streamed(tokenizer, prompt, ids_of(tokenizer, *tokens), size) == text


@pytest.mark.parametrize(("name", "unit"), [("bytes", "Ģ"), ("bytes", "à¤"), ("strip", "<0xFF>"), ("strip", "<s>")])
def test_bytes_that_are_no_text_stream_in_a_bounded_window(name, unit):
    tokenizer, sizes = TOKENIZERS[name], []

    class Counting:
        token_to_id, id_to_token = tokenizer.token_to_id, tokenizer.id_to_token

        def decode(self, ids, skip_special_tokens=True):
            sizes.append(len(ids))
            return tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    stream, [token] = TextStream(Counting()), ids_of(tokenizer, unit)
    texts = [stream.push([token]) for _ in range(1000)]
    assert max(sizes) < 4 * WINDOW and len(sizes) < 7 * 1000
    whole = tokenizer.decode([token] * 1000)
    assert len("".join(texts)) >= len(whole) - 4 and whole.startswith("".join(texts))


@pytest.mark.parametrize(
    ("name", "token", "text"),
    [
        ("strip", "\u2581Paris", " Paris"),
        ("strip", "\u2581\u2581\u2581\u2581", "    "),
        ("strip", "\u2581", " "),
        ("strip", "<0xE5>", REPLACEMENT),
        ("strip", "<s>", "<s>"),
        ("first", "\u2581is", " is"),
        ("bytes", "Ġthe", " the"),
        ("bytes", "å", REPLACEMENT),
    ],
)
def test_a_tokens_own_text_has_its_space(name, token, text):
    tokenizer = TOKENIZERS[name]
    assert text_of_token(tokenizer, *ids_of(tokenizer, token)) == text


def test_a_letter_is_looked_at_once_for_each_stop_string():
    """Whatever the strings hold back: the number of comparisons is linear in the text."""
    compared = []

    class Letters(str):
        def __getitem__(self, at):
            compared.append(at)
            return str.__getitem__(self, at)

    num, stops = 3000, [Letters("a" * 900 + "b"), Letters("ab" * 400)]
    stop = StopStrings(stops)
    compared.clear()
    shown = "".join(stop.push("aaa") for _ in range(num // 3))
    assert shown + stop.finish() == "a" * num and len(compared) <= 6 * num
    for wrong in (["x"] * 65, ["x" * 4097], ["x" * 2049, "y" * 2048], [""]):
        with pytest.raises(RuntimeFault, match="expected at most 64 non-empty strings, of 4096 letters together"):
            SamplingParams(stop=tuple(wrong))
    assert SamplingParams(stop=("x" * 64,) * 64).stop
