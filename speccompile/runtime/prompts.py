# SPDX-License-Identifier: Apache-2.0
"""Reading of prompts, chunk by chunk; the last chunk gives the first new token."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from speccompile.core.acceptance import Verdict
from speccompile.core.proposer import Proposer
from speccompile.core.protocols import Outputs
from speccompile.core.specs import LOGITS, NEXT_TOKEN
from speccompile.errors import RuntimeFault
from speccompile.runtime.faults import FAULTS, NotFinite
from speccompile.runtime.grammar_drafts import read_grammars
from speccompile.runtime.host_verify import logprobs_of_step
from speccompile.runtime.logprobs import TokenLogprobs, prompt_logprobs
from speccompile.runtime.requests import StepOutput, trace_of_step
from speccompile.runtime.sequences import SequenceBatch
from speccompile.runtime.verifier import Verifier


class Chunk(NamedTuple):
    """What reading a chunk of a prompt gave."""

    num: int
    step: StepOutput | None  # with the first new token, where the prompt's last was read; it may end the sequence
    draft_s: float  # seconds that the draft took


def read_chunk(
    verifier: Verifier,
    proposer: Proposer,
    slot: int,
    alone: SequenceBatch,
    reads: bool,
    most: int | None = None,
) -> Chunk:
    """Reads the next chunk of a prompt. Raises NotFinite: a chunk is not; the slot is cleared."""
    sequence, start = alone.sequences[0], int(verifier.lengths[slot])
    if alone.processed:
        read_grammars(alone)
    nodes, outputs, verdict = verifier.read(slot, sequence.tokens, most, sequence.images, alone)
    if NEXT_TOKEN in outputs and outputs[NEXT_TOKEN][0] < 0:
        _clear(verifier, proposer, slot)
        raise NotFinite(start + nodes.shape[1])
    if (num_told := sequence.sampling.prompt_logprobs) is not None:
        after = sequence.tokens[start + 1 : start + 1 + nodes.shape[1]]
        told = prompt_logprobs(np.asarray(outputs[LOGITS])[0], after, num_told)
        sequence.prompt_logprobs[start + 1 :] = told  # of a prompt that is read again, too
    step = None
    if verdict is not None:
        step = _first_step(verifier, alone, outputs, verdict)
    draft_start_s = perf_counter()
    if reads and (step is None or step.finish_reason is None):
        proposer.prefill(slot, sequence, nodes, start, outputs)
    return Chunk(nodes.shape[1], step, perf_counter() - draft_start_s)


def read_prompts(verifier: Verifier, proposer: Proposer, batch: SequenceBatch) -> None:
    """Gives the first slots to `batch.waiting` and reads their prompts whole, for steps without a scheduler."""
    for slot, sequence in enumerate(batch.waiting):
        proposer.start(slot, sequence)
        verifier.lengths[slot], alone = 0, SequenceBatch.alone(sequence)
        while verifier.lengths[slot] < sequence.num_prompt - 1:
            read_chunk(verifier, proposer, slot, alone, sequence.speculation != "off")
        batch.sequences.append(sequence)
    batch.changed()


def _first_step(verifier: Verifier, alone: SequenceBatch, outputs: Outputs, verdict: Verdict) -> StepOutput:
    [sequence] = alone.sequences
    sequence.plan(verifier.max_seq_len, 0)
    if verdict.following[0] < 0:
        return sequence.fail(sequence.fault or NotFinite(len(sequence.tokens)))
    logprobs: Sequence[TokenLogprobs] = ()
    logits = np.asarray(outputs[LOGITS]) if alone.wants_logprobs else None
    try:
        if logits is not None:
            logprobs = logprobs_of_step(verdict, alone.roots(), alone.sequences, logits)[0]
        root = alone.roots() if sequence.wants_trace else None
        step = sequence.emit([verdict.following[0]], 0, 0, False, logprobs, of_prompt=True)
        return step if root is None else step._replace(trace=trace_of_step(sequence.tokenizer, root, verdict, 0))
    except FAULTS as fault:
        return sequence.fail(fault)


def _clear(verifier: Verifier, proposer: Proposer, slot: int) -> None:
    for cache in (verifier.cache, *proposer.caches):
        cache.engine.clear_slot(slot)


class PromptBytes:
    """Most bytes of the text of a prompt. `tokenizer`: of the bundle; None: prompts are token ids."""

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        self._tokenizer, self._max_tokens = tokenizer, max_tokens

    @cached_property
    def most(self) -> int | None:
        """Bytes of a text above which it has more than `max_tokens` tokens; None: its bytes say nothing."""
        longest = most_bytes_of_a_token(self._tokenizer)
        return None if longest is None else longest * self._max_tokens

    def check(self, where: str, text: str) -> None:
        """Refuses a text that cannot fit. Raises RuntimeFault: it is one."""
        size = len(text.encode(errors="surrogatepass"))
        if self.most is not None and size > self.most:
            todo = "Shorten it, or build the bundle with a larger engine.max_seq_len."
            expected = f"at most {self._max_tokens} tokens, which {self.most} bytes have at the most"
            raise RuntimeFault(where, f"a text of {size} bytes", expected, todo)


def most_bytes_of_a_token(tokenizer: Any) -> int | None:
    """Returns the most bytes of a text that one token stands for; None: the tokenizer may drop or merge bytes."""
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
