# SPDX-License-Identifier: Apache-2.0
"""How texts are split before the merges of byte-level BPE, by `tokenizer.ggml.pre`."""

from __future__ import annotations

from dataclasses import dataclass

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
    """A way to split.

    Args:
        patterns: one after another; what matches and what lies between are words.
        ignores_merges: a word that is a token is that token, whatever its merges.
        adds_bos: texts begin with the first special token where the file does not say it.
        is_normalized: texts are brought to Unicode's form C before.
    """

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False
    is_normalized: bool = False


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
