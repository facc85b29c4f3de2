# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a GGUF file gives the ids of the one that it was made of, and its files say where texts end."""

import itertools
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from speccompile.checkpoints.checkpoint import special_tokens
from speccompile.checkpoints.folders import resolve_checkpoint
from speccompile.checkpoints.gguf.header import GgufHeader
from speccompile.checkpoints.gguf.tokenizer import SPLITS, tokenizer_files
from speccompile.errors import CheckpointError
from speccompile.recipe.model_recipe import sampling_defaults
from tests.checkpoints.gguf_lab import write_model

ROOT = Path(__file__).parents[2]
TEXTS = (
    "Hello world", "  two spaces, and a tab\there", " one", "it's we'RE I'll", "12345 678.9 x2 3\u00bd \u00b2",
    "line\n\n\nmore \n ", "def f(x):\n    return x**2  # ok", "naïve café cafe\u0301 Ångström", "Привет, мир!",
    "你好 世界\u3002 こんにちは", "🙂👍🏽 \u200b", "CamelCase HTTPServer iPhone", "<|im_start|>user\nhi<|im_end|>\n",
    "a<|im_end|> b", "<think>x</think>", "", "…—«»\u00a0x", "A/B\\C //path/to", "x" * 50 + " " * 40 + "y",
)  # fmt: skip
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
OWN = ("<think>", "</think>")
CONTROL, USER, UNUSED = 3, 4, 5


@cache
def corpus() -> str:
    return (
        "\n".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))[:6]) + "Привет мир 你好世界 " * 40
    )


def byte_level(steps: Sequence[Any], normalizer: Any = None, *, ignores_merges: bool = False) -> Tokenizer:
    """Returns a trained byte-level tokenizer with these pre-tokenizers."""
    made = Tokenizer(models.BPE(ignore_merges=ignores_merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    if normalizer is not None:
        made.normalizer = normalizer
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet, special_tokens=list(SPECIAL))
    made.train_from_iterator([corpus()], trainer)
    made.add_tokens([AddedToken(text, normalized=False) for text in OWN])
    return made


def by_regex(pattern: str) -> list[Any]:
    return [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


DIGITS = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
PLAIN = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
# As the tokenizer.json of the models that llama.cpp's converter knows by these names.
BYTE_LEVEL: dict[str, Callable[[], Tokenizer]] = {
    "gpt-2": lambda: byte_level(PLAIN),
    "smollm": lambda: byte_level(DIGITS),
    "starcoder": lambda: byte_level(DIGITS),
    "refact": lambda: byte_level(DIGITS),
    "command-r": lambda: byte_level(DIGITS, normalizers.NFC()),
    "qwen2": lambda: byte_level(by_regex(GGUF_PRE_TOKENIZER_SPLITS["qwen2"]), normalizers.NFC()),
    "llama-bpe": lambda: byte_level(by_regex(GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"]), ignores_merges=True),
    "tekken": lambda: byte_level(by_regex(GGUF_PRE_TOKENIZER_SPLITS["tekken"]), ignores_merges=True),
    "gpt-4o": lambda: byte_level(by_regex(GGUF_PRE_TOKENIZER_SPLITS["gpt-4o"])),
    "dbrx": lambda: byte_level(by_regex(GGUF_PRE_TOKENIZER_SPLITS["dbrx"])),
}


def byte_level_keys(source: Tokenizer, pre: str) -> dict[str, Any]:
    """Returns the keys that a converter writes, with rows that only pad the vocabulary."""
    model = json.loads(source.to_str())["model"]
    names = {token: text for text, token in source.get_vocab(with_added_tokens=True).items()}
    padded = len(names) + 4
    tokens = [names.get(token, f"[PAD{token}]") for token in range(padded)]
    kinds = {**dict.fromkeys(SPECIAL, CONTROL), **dict.fromkeys(OWN, USER)}
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(t, UNUSED if t.startswith("[PAD") else 1) for t in tokens],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.add_bos_token": False,
    }  # fmt: skip


def made_from(keys: dict[str, Any], folder: Path) -> Tokenizer:
    """Returns the tokenizer of a file with these keys, as tokenizers reads it and as transformers does."""
    held = {k: tuple(v) if isinstance(v, list) else v for k, v in keys.items()}
    folder.mkdir(exist_ok=True)
    for name, text in tokenizer_files(GgufHeader(folder / "m.gguf", held, {}, "")).items():
        (folder / name).write_text(text)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert theirs(text).input_ids == made.encode(text).ids
    return made


@pytest.mark.parametrize("pre", BYTE_LEVEL)
def test_byte_level_ids_are_those_of_the_source(pre, tmp_path):
    source = BYTE_LEVEL[pre]()
    made = made_from(byte_level_keys(source, pre), tmp_path / "made")
    for text in TEXTS:
        ids = source.encode(text).ids
        assert made.encode(text).ids == ids, text
        assert made.decode(ids, skip_special_tokens=False) == source.decode(ids, skip_special_tokens=False)
    assert made.get_vocab_size() == source.get_vocab_size(), "rows that only pad the vocabulary are no tokens"


@pytest.mark.parametrize("pre", sorted(SPLITS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()))
def test_texts_are_split_as_transformers_splits_them(pre):
    [pattern] = SPLITS[pre].patterns
    ours, theirs = (pre_tokenizers.Split(Regex(p), "isolated") for p in (pattern, GGUF_PRE_TOKENIZER_SPLITS[pre]))
    for text in (*TEXTS, corpus()[:5000]):
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


def sentencepiece(*, has_prefix: bool) -> Tokenizer:
    """Returns a trained tokenizer as those of Llama 2 and Gemma are."""
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replaced = normalizers.Replace(" ", "▁")
    prefix = [normalizers.Prepend("▁")] if has_prefix else []
    made.normalizer = normalizers.Sequence([*prefix, replaced])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=1200, special_tokens=first, max_token_length=12)
    words = [word for line in corpus().splitlines() for word in line.replace(" ", " ▁").split(" ")]
    made.train_from_iterator(words, trainer)
    held = json.loads(made.to_str())
    held["added_tokens"] = [t for t in held["added_tokens"] if t["content"] in first[:3]]
    made = Tokenizer.from_str(json.dumps(held))
    made.add_tokens([AddedToken(text, normalized=False) for text in OWN])
    begins = {"single": "<s> $A", "pair": "<s> $A <s> $B"}
    made.post_processor = processors.TemplateProcessing(**begins, special_tokens=[("<s>", 1)])
    return made


def sentencepiece_keys(source: Tokenizer, *, has_prefix: bool) -> dict[str, Any]:
    tokens = [source.id_to_token(token) for token in range(source.get_vocab_size())]
    kinds = {"<unk>": 2, "<s>": CONTROL, "</s>": CONTROL, **dict.fromkeys(OWN, USER)}
    types = [6 if t.startswith("<0x") else kinds.get(t, 1) for t in tokens]
    merges = [m.split(" ") if isinstance(m, str) else m for m in json.loads(source.to_str())["model"]["merges"]]
    rank = {"".join(merge): float(-n) for n, merge in reversed(list(enumerate(merges)))}
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types, "tokenizer.ggml.scores": [rank.get(t, -1e4) for t in tokens],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": has_prefix,
    }  # fmt: skip


def encode_by_scores(keys: dict[str, Any], text: str) -> list[int]:
    """Returns the ids of a text without special tokens as SentencePiece's BPE defines them: the best pair first."""
    ids = {t: n for n, t in enumerate(keys["tokenizer.ggml.tokens"])}
    scores, types = keys["tokenizer.ggml.scores"], keys["tokenizer.ggml.token_type"]
    parts = list((("▁" if keys["tokenizer.ggml.add_space_prefix"] else "") + text.replace(" ", "▁")) if text else "")
    while True:
        pairs = [(scores[ids[a + b]], -n) for n, (a, b) in enumerate(itertools.pairwise(parts))
                 if a + b in ids and types[ids[a + b]] == 1]  # fmt: skip
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    found: list[int] = []
    for part in parts:
        known = ids.get(part)
        found += [known] if known is not None else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return found


@pytest.mark.parametrize("has_prefix", [True, False])
def test_sentencepiece_ids_are_those_of_the_source_and_of_the_scores(has_prefix, tmp_path):
    source = sentencepiece(has_prefix=has_prefix)
    keys = sentencepiece_keys(source, has_prefix=has_prefix)
    made = made_from(keys, tmp_path / "made")
    for text in TEXTS:
        ids = source.encode(text).ids
        assert made.encode(text).ids == ids, text
        assert made.decode(ids) == source.decode(ids)
        if "<" not in text:
            assert made.encode(text, add_special_tokens=False).ids == encode_by_scores(keys, text), text


@pytest.mark.parametrize(("flags", "ids"), [
    ({}, [0, 11, 12]), ({"add_bos_token": False}, [11, 12]), ({"add_eos_token": True}, [0, 11, 12, 2]),
])  # fmt: skip
def test_special_tokens_around_a_text(flags, ids, tmp_path):
    source = byte_level(by_regex(GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"]), ignores_merges=True)
    keys = {k: v for k, v in byte_level_keys(source, "llama-bpe").items() if not k.endswith("add_bos_token")}
    made = made_from(keys | {f"tokenizer.ggml.{k}": v for k, v in flags.items()}, tmp_path / "made")
    plain = source.encode("()").ids
    assert made.encode("()").ids == [{11: plain[0], 12: plain[-1]}.get(token, token) for token in ids]


def test_phi3s_marks_of_turns_take_the_blanks_after_them(tmp_path):
    keys = sentencepiece_keys(sentencepiece(has_prefix=True), has_prefix=True) | {"general.architecture": "phi3"}
    keys["tokenizer.ggml.tokens"][-1] = "<|user|>"
    made = made_from(keys, tmp_path / "made")
    assert made.encode("<|user|>\n hi").ids == made.encode("<|user|>hi").ids
    assert made.encode("<s> hi").ids != made.encode("<s>hi").ids


def test_gemmas_runs_of_blanks_are_tokens_of_their_own(tmp_path):
    keys = sentencepiece_keys(sentencepiece(has_prefix=False), has_prefix=False)
    first = len(keys["tokenizer.ggml.tokens"])
    keys["tokenizer.ggml.tokens"] += ["  ", "   ", "\n\n"]
    keys["tokenizer.ggml.token_type"] += [USER] * 3
    keys["tokenizer.ggml.scores"] += [-1000.0] * 3
    made = made_from(keys, tmp_path / "made")
    ids = made.encode("a     b\n\n c").ids
    assert [token - first for token in ids if token >= first] == [1, 0, 2], "the longest first"
    assert made.decode(ids) == "a     b\n\n c"


def test_ends_sampling_and_template_are_read(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path / "cache"))
    ends = ["<|return|>", "<|call|>", "<|end|>", "<|eot_id|>", "<s>", "</s>"]
    tokens = ["a", "b", "ab", *(f"t{n}" for n in range(151)), *ends]
    keys = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["a a"], "tokenizer.ggml.token_type": [1] * 154 + [3] * 6,
        "tokenizer.ggml.bos_token_id": 158, "tokenizer.ggml.eos_token_id": 159, "tokenizer.ggml.eot_token_id": 7,
        "tokenizer.chat_template": "{{ messages }}", "general.sampling.temp": 0.5, "general.sampling.top_k": 20,
    }  # fmt: skip
    with pytest.raises(CheckpointError, match=r"merges\): got 'a a'; expected two tokens that make a third one"):
        write_and_resolve(tmp_path / "bad.gguf", keys)
    folder = write_and_resolve(tmp_path / "m.gguf", keys | {"tokenizer.ggml.merges": ["a b"]})
    assert special_tokens(folder) == ([159, 7, 157, 154, 155], 158), "<|end|> ends no text where a message follows"
    assert sampling_defaults(folder) == {"temperature": 0.5, "top_k": 20}
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"


def write_and_resolve(path: Path, keys: dict[str, Any]) -> Path:
    write_model(path, "llama", tokenizer=keys)
    return resolve_checkpoint(str(path))


@pytest.mark.parametrize(("changes", "said"), [
    ({"model": "bert"}, r"tokenizer.ggml.model\): got 'bert'; expected gpt2"),
    ({"pre": "future"}, r"tokenizer.ggml.pre\): got 'future'; expected one of default, gpt-2"),
    ({"token_type": [1, 1]}, r"tokenizer.ggml.token_type\): got 2 numbers; expected 4, one a token"),
    ({"tokens": [1, 2, 3, 4]}, r"tokenizer.ggml.tokens\): got .*; expected a list of texts"),
    ({"merges": None}, r"tokenizer.ggml.merges\): got none; expected the merges of BPE"),
    ({"merges": ["ab"]}, r"tokenizer.ggml.merges\): got 'ab'; expected two tokens"),
    ({"add_bos_token": 1}, r"tokenizer.ggml.add_bos_token\): got 1; expected true or false"),
])  # fmt: skip
def test_a_tokenizer_that_is_not_understood_is_refused(changes, said, tmp_path):
    keys = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab", "c"], "merges": ["a b"], **changes}
    held = {f"tokenizer.ggml.{k}": tuple(v) if isinstance(v, list) else v for k, v in keys.items() if v is not None}
    with pytest.raises(CheckpointError, match=said):
        tokenizer_files(GgufHeader(tmp_path / "m.gguf", held, {}, ""))
