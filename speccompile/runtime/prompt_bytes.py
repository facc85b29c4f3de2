# SPDX-License-Identifier: Apache-2.0
"""Refuses texts that cannot fit into a context by their size in bytes, before they are tokenized."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from speccompile.errors import RuntimeFault


class PromptBytes:
    """Most bytes of the text of a prompt.

    Args:
        tokenizer: of the bundle; None: prompts are token ids.
    """

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        self._tokenizer, self._max_tokens = tokenizer, max_tokens

    @cached_property
    def most(self) -> int | None:
        """Bytes of a text above which it has more than `max_tokens` tokens; None: its bytes say nothing."""
        longest = most_bytes_of_a_token(self._tokenizer)
        return None if longest is None else longest * self._max_tokens

    def check(self, where: str, text: str) -> None:
        """Refuses a text that cannot fit.

        Raises:
            RuntimeFault: it is one.
        """
        size = len(text.encode(errors="surrogatepass"))
        if self.most is not None and size > self.most:
            todo = "Shorten it, or build the bundle with a larger engine.max_seq_len."
            expected = f"at most {self._max_tokens} tokens, which {self.most} bytes have at the most"
            raise RuntimeFault(where, f"a text of {size} bytes", expected, todo)


def most_bytes_of_a_token(tokenizer: Any) -> int | None:
    """Returns the most bytes of a text that one token stands for; None: there is no bound.

    There is one for byte-level vocabularies whose tokenizer drops and merges nothing.
    """
    if type(getattr(tokenizer, "model", None)).__name__ != "BPE" or tokenizer.pre_tokenizer is None:
        return None
    steps = list(_steps(json.loads(tokenizer.pre_tokenizer.__getstate__())))
    is_bytes = any(step.get("type") == "ByteLevel" for step in steps)
    drops = tokenizer.normalizer is not None or any(step.get("behavior") == "Removed" for step in steps)
    added = tokenizer.get_added_tokens_decoder().values()
    if not is_bytes or drops or any(token.lstrip or token.rstrip for token in added):
        return None
    # A letter of the vocabulary is a byte.
    return max((*map(len, tokenizer.get_vocab(False)), *(len(token.content.encode()) for token in added)))


def _steps(pre_tokenizer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield pre_tokenizer
    for step in pre_tokenizer.get("pretokenizers") or ():
        yield from _steps(step)
