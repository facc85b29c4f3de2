# SPDX-License-Identifier: Apache-2.0
"""Logprobs as OpenAI's API writes them: tokens by their texts and bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from speccompile.runtime.logprobs import TokenLogprobs, finite
from speccompile.runtime.text import REPLACEMENT

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # what SentencePiece writes for a space; a decoder drops the first one of a text


@cache
def _bytes_of_letters() -> dict[str, int]:
    """Returns the byte that each letter of a byte-level vocabulary stands for (the GPT-2 alphabet)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + at): byte for at, byte in enumerate(hidden)}


class TokenTexts:
    """Texts and bytes of single tokens.

    Args:
        tokenizer: of the bundle; None: tokens are named by their ids.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        """Returns the text of a token; bytes that are no character of their own are shown as one replacement."""
        if self._tokenizer is None:
            return f"token_id:{token}"
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        is_spaced = (self._name(token) or "").startswith(_SPACE) and not text.startswith(" ")
        return f" {text}" if is_spaced else text

    def bytes_of(self, token: int) -> list[int]:
        """Returns the bytes of a token, also where they are a part of a character."""
        text, name = self.text(token), self._name(token)
        if REPLACEMENT in text and name is not None:
            letters = _bytes_of_letters()
            if found := _BYTE.fullmatch(name):
                return [int(found[1], 16)]
            if all(letter in letters for letter in name):
                return [letters[letter] for letter in name]
        return list(text.encode())

    def _name(self, token: int) -> str | None:
        names = getattr(self._tokenizer, "id_to_token", None)
        return None if names is None else names(token)

    def chat(self, found: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Returns the `logprobs` of a chat's choice."""
        content = []
        for entry in found:
            top = [self._entry(token, logprob) for token, logprob in entry.top]
            content.append({**self._entry(entry.token, entry.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def completion(self, found: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
        """Returns the `logprobs` of a completion's choice.

        Args:
            found: of its tokens.
            offset: characters of its text before the first of them.
        """
        texts, offsets = [self.text(entry.token) for entry in found], []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        top = [
            {self.text(token): finite(logprob) for token, logprob in (*entry.top, (entry.token, entry.logprob))}
            for entry in found
        ]
        values = [finite(entry.logprob) for entry in found]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token), "logprob": finite(logprob), "bytes": self.bytes_of(token)}
