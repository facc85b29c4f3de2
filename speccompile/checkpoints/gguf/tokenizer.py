# SPDX-License-Identifier: Apache-2.0
"""The tokenizer in a GGUF file as the files of a transformers tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from speccompile.checkpoints.gguf.header import GgufHeader
from speccompile.common.json_reader import shown
from speccompile.errors import CheckpointError

TOKENS = "tokenizer.ggml.tokens"
_KEY = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _OWN, _UNUSED, _BYTE = 2, 3, 4, 5, 6  # of `token_type`
_SPACE = "▁"
_PAD = re.compile(r"\[PAD\d+\]")
_TODO = "Use the transformers checkpoint that the file was made of."
# Ends of a turn or a text, by the name that vocabularies give them; files have a key for one or two of them alone.
_ENDS = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>", "<|eom|>", "<EOT>",
)  # fmt: skip
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
             "penalty_repeat": "repetition_penalty"}  # fmt: skip
_IDS = {"bos": "bos", "pad": "padding"}
Json = dict[str, Any]


def tokenizer_files(header: GgufHeader) -> dict[str, str]:
    """Returns the texts of a tokenizer's files by name, generation_config.json among them; {} where there is none.

    Raises:
        CheckpointError: a kind of tokenizer that is not known, or arrays that do not go together.
    """
    if TOKENS not in header.fields:
        return {}
    vocab = _Vocab(header)
    files = {"tokenizer.json": vocab.tokenizer(), "tokenizer_config.json": vocab.config()}
    texts = {name: json.dumps(content, ensure_ascii=False) for name, content in files.items()}
    texts["generation_config.json"] = json.dumps(vocab.generation())
    template = header.fields.get("tokenizer.chat_template")
    return texts | ({"chat_template.jinja": template} if isinstance(template, str) else {})


class _Vocab:
    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.kind = self.field("model")
        if self.kind not in ("gpt2", "llama"):
            raise self.wrong("model", shown(self.kind), "gpt2 (byte-level BPE) or llama (SentencePiece)")
        self.is_bytes = self.kind == "gpt2"
        self.tokens: Sequence[str] = self.texts("tokens")
        num = len(self.tokens)
        self.types: Sequence[int] = self.numbers("token_type", num) or (1,) * num
        self.split = self._split() if self.is_bytes else Split(())
        self.adds_bos = self.flag("add_bos_token", default=self.split.adds_bos or not self.is_bytes)
        self.has_prefix = self.flag("add_space_prefix", default=not self.is_bytes)

    def _split(self) -> Split:
        name = self.field("pre", "default")
        if name not in SPLITS:
            raise self.wrong("pre", shown(name), f"one of {', '.join(SPLITS)}")
        return SPLITS[name]

    def tokenizer(self) -> Json:
        """Returns the content of tokenizer.json."""
        vocab: dict[str, int] = {}
        for token, (text, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if not (kind == _UNUSED and _PAD.fullmatch(text)):  # rows of the embedding that no text reaches
                vocab.setdefault(text, token)
        parts = self.byte_level() if self.is_bytes else self.sentencepiece()
        unknown = self.special("unknown") if not self.is_bytes else None
        model = {
            "type": "BPE", "dropout": None, "unk_token": unknown, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": not self.is_bytes, "byte_fallback": not self.is_bytes,
            "ignore_merges": self.split.ignores_merges, "vocab": vocab, "merges": self.merges(vocab),
        }  # fmt: skip
        shared = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": self.added(vocab)}
        return {**shared, **parts, "post_processor": self.template(parts["post_processor"]), "model": model}

    def byte_level(self) -> Json:
        bytes_ = {"type": "ByteLevel", "add_prefix_space": self.has_prefix, "trim_offsets": True, "use_regex": False}
        splits = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in self.split.patterns
        ]
        return {
            "normalizer": {"type": "NFC"} if self.split.is_normalized else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, bytes_]},
            "decoder": bytes_,
            "post_processor": {**bytes_, "trim_offsets": False},
        }

    def sentencepiece(self) -> Json:
        replaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        prefix = [{"type": "Prepend", "prepend": _SPACE}] if self.has_prefix else []
        decoders: list[Json] = [
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            *({"type": kind} for kind in ("ByteFallback", "Fuse")),
        ]
        if self.has_prefix:
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*prefix, replaced]},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "post_processor": None,
        }

    def merges(self, vocab: Mapping[str, int]) -> list[list[str]]:
        if f"{_KEY}merges" not in self.header.fields:
            if self.is_bytes:
                raise self.wrong("merges", "none", "the merges of BPE")
            return _merges_from_scores(self.pieces(), self.numbers("scores", len(self.tokens)))
        made = []
        for text in self.texts("merges"):
            first, space, second = text.partition(" ") if not text.startswith(" ") else (" ", " ", text[2:])
            if not space or first not in vocab or second not in vocab or first + second not in vocab:
                raise self.wrong("merges", shown(text), "two tokens that make a third one")
            made.append([first, second])
        return made

    def pieces(self) -> dict[str, int]:
        no_piece = (_UNKNOWN, _CONTROL, _OWN, _UNUSED, _BYTE)
        return {t: i for i, (t, kind) in enumerate(zip(self.tokens, self.types, strict=True)) if kind not in no_piece}

    def added(self, vocab: Mapping[str, int]) -> list[Json]:
        """Returns the tokens that are found in a text before it is split."""
        named = {self.field(f"{name}_token_id") for name in ("bos", "eos", "eot", "eom")}
        strips = self.header.fields.get("general.architecture") == "phi3" and not self.is_bytes
        made = []
        for token, (text, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            is_special = kind in (_CONTROL, _UNKNOWN) or token in named
            if vocab.get(text) != token or not text or not (is_special or kind == _OWN):
                continue
            # Phi-3 takes the blanks after its marks of turns away; no key says so.
            rstrip = strips and text not in ("<unk>", "<s>", "<|endoftext|>")
            flags = {"single_word": False, "lstrip": False, "rstrip": rstrip, "normalized": False}
            made.append({"id": token, "content": text, **flags, "special": is_special})
        return made

    def template(self, otherwise: Json | None) -> Json | None:
        """Returns the post-processor that puts special tokens around a text."""
        ends = self.flag("add_eos_token", default=False)
        around = [("bos", self.adds_bos), ("eos", ends)]
        names = {name: self.special(name) for name, wanted in around if wanted and self.special(name)}
        if not names:
            return otherwise

        def one(name: str) -> Json:
            return {"SpecialToken": {"id": names[name], "type_id": 0}}

        def pieces(letters: str) -> list[Json]:
            made: list[Json] = []
            for letter in letters:
                made += [one("bos")] if "bos" in names else []
                made += [{"Sequence": {"id": letter, "type_id": 0}}]
                made += [one("eos")] if "eos" in names else []
            return made

        ids = {text: self.field(f"{name}_token_id") for name, text in names.items()}
        special = {text: {"id": text, "ids": [token], "tokens": [text]} for text, token in ids.items()}
        made = {"type": "TemplateProcessing", "single": pieces("A"), "pair": pieces("AB"), "special_tokens": special}
        return made if otherwise is None else {"type": "Sequence", "processors": [otherwise, made]}

    def config(self) -> Json:
        """Returns the content of tokenizer_config.json."""
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        held = {name: text for name, key in names.items() if (text := self.special(key)) is not None}
        length = self.header.fields.get(f"{self.header.fields.get('general.architecture')}.context_length")
        return {
            "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
            "model_max_length": length or 1 << 30, **held,
        }  # fmt: skip

    def generation(self) -> Json:
        """Returns the content of generation_config.json: where texts end, and the author's sampling parameters."""
        ends = list(self.ends())
        made: Json = {f"{name}_token_id": self.field(f"{key}_token_id") for name, key in _IDS.items()}
        made["eos_token_id"] = ends[0] if len(ends) == 1 else ends or None
        held = {name: self.header.fields.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
        return {name: value for name, value in {**made, **held}.items() if value is not None}

    def ends(self) -> Iterator[int]:
        """Yields the tokens that end a text."""
        num, found = len(self.tokens), []
        named = [self.field(f"{name}_token_id") for name in ("eos", "eot", "eom")]
        by_name = {t: i for i, (t, kind) in enumerate(zip(self.tokens, self.types, strict=True)) if kind == _CONTROL}
        ends = [name for name in _ENDS if name in by_name]
        if "<|return|>" in ends and "<|call|>" in ends:  # harmony: <|end|> ends a message, and another one follows
            ends = [name for name in ends if name != "<|end|>"]
        for token in [*named, *(by_name[name] for name in ends)]:
            if isinstance(token, int) and 0 <= token < num and token not in found:
                found.append(token)
                yield token

    def special(self, name: str) -> str | None:
        token = self.field(f"{name}_token_id")
        is_there = isinstance(token, int) and 0 <= token < len(self.tokens)
        return self.tokens[token] if is_there else None

    def field(self, name: str, default: Any = None) -> Any:
        return self.header.fields.get(_KEY + name, default)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.field(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, shown(value), "true or false")
        return value

    def texts(self, name: str) -> Sequence[str]:
        value = self.field(name)
        if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
            raise self.wrong(name, shown(value), "a list of texts")
        return value

    def numbers(self, name: str, num: int) -> Sequence[Any]:
        value = self.field(name)
        if value is not None and (not isinstance(value, tuple) or len(value) != num):
            got = f"{len(value)} numbers" if isinstance(value, tuple) else shown(value)
            raise self.wrong(name, got, f"{num}, one a token")
        return value or ()

    def wrong(self, name: str, got: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.header.path} ({_KEY}{name})", got, expected, _TODO)


def _merges_from_scores(pieces: Mapping[str, int], scores: Sequence[float]) -> list[list[str]]:
    made: list[tuple[float, int, int, str, str]] = []
    for piece, token in pieces.items():
        score = -float(scores[token]) if scores else float(token)
        for cut in range(1, len(piece)):
            first, second = piece[:cut], piece[cut:]
            if first in pieces and second in pieces:
                made.append((score, pieces[first], pieces[second], first, second))
    return [[first, second] for _, _, _, first, second in sorted(made)]


_CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_WORD_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str = r"\p{N}") -> str:
    word, rest = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*"
    return rf"(?i:{_CONTRACTIONS})|{word}|{digits}|{rest}|{_WORD_END}"


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _by_case(ending: str, digits: str) -> str:
    first, last = rf"{_UPPER}*{_LOWER}+{ending}", rf"{_UPPER}+{_LOWER}*{ending}"
    words = "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{word}" for word in (first, last))
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_WORD_END}"


@dataclass(frozen=True)
class Split:
    """A way to split."""

    patterns: tuple[str, ...]  # one after another; what matches and what lies between are words
    ignores_merges: bool = False  # a word that is a token is that token, whatever its merges
    adds_bos: bool = False  # texts begin with the first special token where the file does not say it
    is_normalized: bool = False  # texts are brought to Unicode's form C before


_ONE_DIGIT = Split((r"\p{N}", _GPT2))
_LLAMA3 = Split((_words(digits=r"\p{N}{1,3}"),), ignores_merges=True, adds_bos=True)
_QWEN2 = Split((_words(),), is_normalized=True)
_GPT4O = Split((_by_case(rf"(?i:{_CONTRACTIONS})?", r"\p{N}{1,3}"),))

SPLITS: dict[str, Split] = {
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "jais", "exaone4", "modern-bert", "mellum", "gigachat", "a.x-4.0",
                     "trillion", "granite-docling"), Split((_GPT2,))),
    "olmo": Split((_GPT2,), is_normalized=True),
    "command-r": Split((r"\p{N}", _GPT2), is_normalized=True),
    **dict.fromkeys(("starcoder", "refact", "smollm", "codeshell", "exaone", "minerva-7b"), _ONE_DIGIT),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0",
                     "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), Split((_words(digits=r"\p{N}{1,3}"),))),
    **dict.fromkeys(("qwen2", "megrez", "kormo", "f2llmv2"), _QWEN2),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "hunyuan", "solar-open"), Split((_words(),))),
    "tekken": Split((_by_case("", r"\p{N}"),), ignores_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    "falcon": Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "deepseek-v3": Split((
        r"\p{N}{1,3}", "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_WORD_END}",
    )),
}  # fmt: skip
