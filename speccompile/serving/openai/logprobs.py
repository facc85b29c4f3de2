# SPDX-License-Identifier: Apache-2.0
"""Logprobs as OpenAI's API writes them: tokens by their texts and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from speccompile.runtime.logprobs import TokenLogprobs, finite
from speccompile.runtime.text import REPLACEMENT, bytes_of_token, text_of_token


class TokenTexts:
    """Texts and bytes of single tokens. `tokenizer`: of the bundle; None: tokens are named by their ids."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        """Returns the text of a token; a part of a character becomes one replacement character."""
        if self._tokenizer is None:
            return f"token_id:{token}"
        return text_of_token(self._tokenizer, token)

    def bytes_of(self, token: int) -> list[int]:
        """Returns the bytes of a token, also where they are a part of a character."""
        text = self.text(token)
        raw = bytes_of_token(self._tokenizer, token) if REPLACEMENT in text else None
        return list(text.encode() if raw is None else raw)

    def chat(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Returns the `logprobs` of a chat's choice."""
        content = []
        for entry in entries:
            top = [self._entry(token, logprob) for token, logprob in entry.top]
            content.append({**self._entry(entry.token, entry.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def completion(self, entries: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
        """Returns the `logprobs` of a completion's choice."""
        texts, offsets = [self.text(entry.token) for entry in entries], []
        for entry in entries:
            offsets.append(max(offset - _is_inside(self.bytes_of(entry.token)), 0))
            offset += self.num_letters(entry.token)
        top = [
            {self.text(token): finite(logprob) for token, logprob in (*entry.top, (entry.token, entry.logprob))}
            for entry in entries
        ]
        values = [finite(entry.logprob) for entry in entries]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}

    def completion_prompt(
        self, tokens: Sequence[int], entries: Sequence[TokenLogprobs | None], text: str
    ) -> dict[str, list[Any]]:
        """Returns the part of a completion's `logprobs` that is about its prompt; the first token has none."""
        part = self.completion([entry for entry in entries if entry is not None], 0)
        return {
            "tokens": [self.text(token) for token in tokens],
            "token_logprobs": [None, *part["token_logprobs"]],
            "top_logprobs": [None, *part["top_logprobs"]],
            "text_offset": self.offsets(tokens, text),
        }

    def prompt(self, entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """Returns vLLM's `prompt_logprobs`: the candidates of each token of the prompt by id; the first has none."""
        return [None if entry is None else self._by_id(entry) for entry in entries]

    def _by_id(self, entry: TokenLogprobs) -> dict[str, Any]:
        ranked = {token: (logprob, at) for at, (token, logprob) in enumerate(entry.top, 1)}
        ranked[entry.token] = (entry.logprob, entry.rank)
        return {
            str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": self.text(token)}
            for token, (logprob, rank) in ranked.items()
        }

    def num_letters(self, token: int) -> int:
        """Returns how many characters begin with a token's bytes."""
        return sum(byte & 0xC0 != 0x80 for byte in self.bytes_of(token))

    def offsets(self, tokens: Sequence[int], text: str) -> list[int]:
        """Returns the character at which each token begins; tokens that the tokenizer added have no text."""
        raw, at, num, offsets = text.encode(), 0, 0, list[int]()
        for token in tokens:
            piece = bytes(self.bytes_of(token))
            if not raw.startswith(piece, at):  # a space that a decoder drops, or none of the text
                piece = piece[1:] if piece.startswith(b" ") and raw.startswith(piece[1:], at) else b""
            offsets.append(num - _is_inside(raw[at : at + 1]))
            at += len(piece)
            num += sum(byte & 0xC0 != 0x80 for byte in piece)
        return offsets

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token), "logprob": finite(logprob), "bytes": self.bytes_of(token)}


def _is_inside(raw: Sequence[int]) -> bool:
    return bool(raw) and raw[0] & 0xC0 == 0x80
