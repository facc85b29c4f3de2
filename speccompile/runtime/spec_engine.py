# SPDX-License-Identifier: Apache-2.0
"""Decodes prompts with a loaded bundle, into generations or streams of steps."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Self

from tokenizers import Tokenizer

from speccompile.bundle.bundle import Bundle
from speccompile.common.chat_prompts import tokens_of_messages
from speccompile.common.tokenizer_file import encode_text
from speccompile.core import registry
from speccompile.core.jobs import MethodContext
from speccompile.core.proposer import Proposer
from speccompile.core.protocols import Engine
from speccompile.core.sampling_params import SamplingParams
from speccompile.errors import RuntimeFault
from speccompile.runtime.control import Planner, controller_of
from speccompile.runtime.grammars import Grammars
from speccompile.runtime.images import Image, ImageData, ImageEncoder
from speccompile.runtime.requests import Generation, Images, Prompt, StepOutput
from speccompile.runtime.scheduler import decode
from speccompile.runtime.sequences import SequenceBatch, TokenSequence, match_arguments, token_ids
from speccompile.runtime.synthetic import SyntheticVerifier
from speccompile.runtime.text import PromptBytes, TextSink, text_of_tokens
from speccompile.runtime.verifier import Verifier


class Stream(Iterator[StepOutput]):
    """Iterates over the steps of one sequence; `generation` is set after the last."""

    def __init__(
        self, prompt: list[int], decoded: Iterator[list[StepOutput]], finish: Callable[[StepOutput], Generation]
    ) -> None:
        self.prompt, self._decoded, self._finish = prompt, decoded, finish
        self.generation: Generation | None = None  # set after the last step

    def __next__(self) -> StepOutput:
        [step] = next(self._decoded)
        if step.finish_reason:
            self.generation = self._finish(step)
        return step


class SpecEngine:
    """A target with its proposer. One run at a time: a new one ends those that were not read to the end.

    `close` frees it; as a context manager it closes itself.

    Args:
        target: the target's engine (`verified_spec`).
        proposer: the method's proposer over the same engines.
        tokenizer: None where prompts and results are token ids.
        eos_token_ids: the model's own end-of-sequence tokens.
        may_stop: the method's draft length is not fixed, so drafting may stop where plain decoding is faster.
        images: the vision tower; None: prompts have no images.
        rates: of synthetic acceptance; empty: the target decides.
    """

    def __init__(
        self,
        target: Engine,
        drafts: Mapping[str, Engine],
        proposer: Proposer,
        tokenizer: Tokenizer | None,
        context: MethodContext,
        eos_token_ids: Sequence[int] = (),
        defaults: SamplingParams | None = None,
        bundle: Bundle | None = None,
        chunk: int = 128,
        may_stop: bool = False,
        images: ImageEncoder | None = None,
        rates: Sequence[float] = (),
    ) -> None:
        self.images = images
        self.tokenizer, self.context, self.bundle = tokenizer, context, bundle
        self.defaults = defaults or SamplingParams()
        self.eos_token_ids = frozenset(eos_token_ids)
        sizes = target, context.max_seq_len, chunk
        self.verifier = SyntheticVerifier(*sizes, rates) if rates else Verifier(*sizes)
        self.prompt_bytes = PromptBytes(tokenizer, context.max_seq_len)
        self.proposer = proposer
        self._plain = registry.method("none")
        self.engines = (target, *drafts.values())
        self._num_runs, self._is_closed = 0, False
        self._stepping = threading.Lock()  # during a step
        self.controller: Planner | None = controller_of(proposer) if may_stop else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every run and frees the engines with their caches; nothing is decoded afterwards."""
        if not self._is_closed:
            self._is_closed = True
            self._num_runs += 1
            self.close_grammars()
            self.engines, self.images, self.controller = (), None, None
            del self.verifier, self.proposer
            gc.collect()  # engines and what is bound to their caches refer to each other

    @cached_property
    def grammars(self) -> Grammars:
        """The grammars of its requests, made with the first one."""
        return Grammars(self.tokenizer, self.verifier.engine.spec.vocab_size, self.eos_token_ids)

    def close_grammars(self) -> None:
        """Ends the compiling of grammars, if there is any: see `Grammars.close`."""
        if "grammars" in vars(self):
            self.grammars.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeFault("engine", "a call after close()", "an open engine", "Load it again: speccompile.load.")

    def __repr__(self) -> str:
        sizes = f"{self.context.max_slots} slots of {self.context.max_seq_len} tokens"
        if self.bundle is None:
            return f"<SpecEngine, {sizes}>"
        recipe = self.bundle.recipe
        home = f"{recipe.engine.backend} on {recipe.engine.device}"
        return f"<SpecEngine of {self.bundle.path}: {recipe.method}, {home}, {sizes}>"

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        images: Images | None = None,
        speculative: bool = True,
        batch_size: int | None = None,
    ) -> list[Generation]:
        """Decodes prompts to their ends; returns one generation per prompt, in their order.

        Args:
            prompts: one or more texts, or lists of token ids.
            sampling: for all prompts, or one for each; None: the bundle's defaults.
            images: a list for each prompt, or of one prompt its list, in the order of the prompt: PNG, JPEG or WebP as
                bytes or a path, or arrays [height, width, 3] uint8. A text has the token that begins an image where
                each stands; token ids have all tokens of each.
            speculative: False decodes with the target alone.
            batch_size: sequences decoded at once; None: as many as the bundle was built for.

        Raises:
            RuntimeFault: a prompt is empty, too long, not of the vocabulary, or neither a text nor token ids; the
                message has its index. Or `sampling` is not a `SamplingParams`; or an image cannot be read.
        """
        results: dict[int, Generation] = {}
        given: dict[str, Any] = {"images": images, "speculative": speculative, "batch_size": batch_size}
        for index, generation in self.run(prompts, sampling, **given):
            results[index] = generation
        return [results[index] for index in range(len(results))]

    def run(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        images: Images | None = None,
        speculative: bool = True,
        batch_size: int | None = None,
    ) -> Iterator[tuple[int, Generation]]:
        """Decodes as `generate`, but yields (index of the prompt, generation) as sequences end.

        Raises:
            RuntimeFault: as `generate`, before anything is decoded; or as `stream`.
        """
        sequences = self._make_sequences(prompts, sampling, images, with_text=False)
        return self._finished(sequences, self._decode(sequences, speculative, batch_size))

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        images: Sequence[ImageData] = (),
        speculative: bool = True,
        wants_trace: bool = False,
    ) -> Stream:
        """Decodes one prompt step by step; `wants_trace` adds its tree to each.

        The `text` of a step can be shown: never half a character, no part of a stop string.

        Raises:
            RuntimeFault: as `generate`; or another run was started since the last step was read.
        """
        [sequence] = self._make_sequences([prompt], sampling, [images], with_text=True)
        sequence.wants_trace = wants_trace
        decoded = self._decode([sequence], speculative, 1)
        return Stream(list(sequence.tokens), decoded, partial(self._generation, sequence))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        *,
        speculative: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> Generation:
        """Decodes the assistant's answer to a conversation. Raises as `generate` and `chat_prompt`.

        Args:
            messages: with `role` and `content`, the last one the user's.
            sampling: None: the bundle's defaults.
            speculative: False decodes with the target alone.
            variables: more variables for the model's chat template.
        """
        [answer] = self.generate([self.chat_prompt(messages, variables)], sampling, speculative=speculative)
        return answer

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        *,
        num_images: int = 0,
        where: str = "messages",
    ) -> list[int]:
        """Returns the token ids of a conversation by the model's chat template, with the assistant's turn opened.

        Raises:
            RuntimeFault: the template refuses the messages, or its package is not installed.
            BundleError: the bundle has no chat template.
        """
        folder = None if self.bundle is None else self.bundle.tokenizer_folder
        expand = partial(self.expand_images, num_images=num_images, where=where)
        return tokens_of_messages(self.tokenizer, folder, messages, variables, where=where, expand=expand)

    def _finished(
        self, sequences: list[TokenSequence], decoded: Iterator[list[StepOutput]]
    ) -> Iterator[tuple[int, Generation]]:
        for steps in decoded:
            for step in steps:
                if step.finish_reason:
                    yield step.output_index, self._generation(sequences[step.output_index], step)

    def read_images(self, images: Sequence[ImageData]) -> list[Image]:
        """Returns images as the vision tower reads them. Raises RuntimeFault: there is none, or one cannot be read."""
        if not len(images):
            return []
        if self.images is None:
            todo = "Build it from a recipe with target.vision: true, or leave the images out."
            raise RuntimeFault("images", f"{len(images)}, for a model of text alone", "a vision tower", todo)
        return [self.images.read(image) for image in images]

    def expand_images(self, text: str, num_images: int, where: str = "prompt") -> str:
        """Returns a text with the tokens of each image where its mark is; see `ImageEncoder.expand`."""
        return text if self.images is None or not num_images else self.images.expand(where, text, num_images)

    def encode(self, text: str, num_images: int = 0, where: str = "prompt") -> list[int]:
        """Returns the token ids of a text, with special tokens that the tokenizer adds, and those of its images.

        Raises:
            RuntimeFault: the bundle has no tokenizer, or fails on the text, or that is no Unicode; `where` names it.
        """
        if self.tokenizer is None:
            raise RuntimeFault(
                where, "a text", "token ids", "This bundle has no tokenizer: it was built from a config."
            )
        return encode_text(self.tokenizer, self.expand_images(text, num_images), where)

    def text_sink(self, params: SamplingParams, prompt: Sequence[int]) -> TextSink | None:
        """Returns a sink that makes text of a request's tokens after those of its prompt; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        hidden = None if params.skip_special_tokens else self.eos_token_ids
        return TextSink(self.tokenizer, params.stop, hidden, prompt)

    def reset(self, rows: int = 1, clears: bool = False) -> int:
        """Ends earlier runs and invalidates their caches. Returns the number of the new run.

        Args:
            clears: zero the caches as well, after a fault that may have left rows that are not finite.
        """
        self._check_open()
        self._num_runs += 1
        for engine in self.engines:
            engine.reset(rows)
            for slot in range(engine.max_slots if clears else 0):
                engine.clear_slot(slot)
        return self._num_runs

    def _decode(
        self, sequences: list[TokenSequence], speculative: bool, batch_size: int | None
    ) -> Iterator[list[StepOutput]]:
        most = self.context.max_slots
        if batch_size is not None and not 1 <= batch_size <= most:
            todo = "Build the bundle with a larger engine.max_batch_size."
            raise RuntimeFault("batch_size", str(batch_size), f"1 to {most}", todo)
        proposer = self.proposer if speculative else self._plain.make_proposer(None, {}, self.context)
        max_slots = batch_size or most
        rows = max((sequence.num_prompt for sequence in sequences[:max_slots]), default=1)
        planner = self.controller if speculative else None
        for sequence in sequences if not speculative else ():
            sequence.speculation = "off"
        max_forced = self.context.max_draft_nodes if speculative else 0
        waiting = SequenceBatch(sequences, max_slots, not proposer.may_draw, max_forced)
        todo = "Read this one to its end first, or serve many at once: speccompile.load_service."
        decoded, run = decode(self.verifier, proposer, waiting, self.engines, planner), 0
        while self._stepping.acquire(blocking=False):
            try:
                run = run or self.reset(rows)
                if run != self._num_runs:
                    self._check_open()
                    raise RuntimeFault("stream", "a newer run on the same engine", "one run at a time", todo)
                steps = next(decoded, None)
            finally:
                self._stepping.release()
            if steps is None:
                return
            yield steps
        raise RuntimeFault("engine", "a call while another thread decodes", "one thread at a time", todo)

    def _make_sequences(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        images: Images | None,
        with_text: bool,
    ) -> list[TokenSequence]:
        self._check_open()
        given, asked, rows = match_arguments(prompts, sampling, images, self.defaults)
        read = [self.read_images(row) for row in rows]
        jobs = enumerate(zip(given, asked, read, strict=True))
        return [self.make_sequence(i, prompt, params, with_text, found) for i, (prompt, params, found) in jobs]

    def make_sequence(
        self, index: int, prompt: Prompt, params: SamplingParams, with_text: bool, images: Sequence[Image] = ()
    ) -> TokenSequence:
        """Returns a sequence to decode. Raises RuntimeFault: as `generate`."""
        is_text, where = isinstance(prompt, str), f"prompt {index}"
        tokens = self.encode(str(prompt), len(images), where) if is_text else token_ids(index, prompt)
        self.check_prompt(where, tokens)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_token_ids)
        if params.stop and self.tokenizer is None:
            raise RuntimeFault(f"prompt {index}", "stop strings", "a bundle with a tokenizer", "Use stop_token_ids.")
        sink = self.text_sink(params, tokens) if with_text or params.stop or not params.skip_special_tokens else None
        sequence = TokenSequence(index, tokens, params, stop_ids, sink)
        if images and self.images is not None:
            sequence.images = self.images.locate(f"prompt {index}", tokens, images)
            if params.prompt_logprobs is not None:
                got, todo = "prompt_logprobs with images", "Leave one of them out."
                raise RuntimeFault(f"prompt {index} (prompt_logprobs)", got, "a prompt of text", todo)
        if params.structured_outputs is not None:
            num_tokens = min(len(tokens) + params.max_new_tokens, self.context.max_seq_len)
            sequence.grammar = self.grammars.matcher(params.structured_outputs, tokens, num_tokens)
        if params.adapter:
            sequence.adapter = self._number_of_adapter(f"prompt {index} (adapter)", params.adapter)
        sequence.may_draft = self.verifier.may_draft(f"prompt {index}", params)
        return sequence

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the LoRA adapters that a request may choose."""
        return () if self.bundle is None else self.bundle.adapters

    def _number_of_adapter(self, where: str, name: str) -> int:
        if name not in self.adapters:
            expected = f"one of {', '.join(self.adapters)}" if self.adapters else "none, as the bundle has no adapters"
            raise RuntimeFault(where, repr(name), expected, "Correct it, or build with target.adapters.")
        return self.adapters.index(name) + 1

    def check_prompt(self, where: str, tokens: Sequence[int]) -> None:
        """Refuses a prompt that is empty, too long or not of the vocabulary. Raises RuntimeFault: one of these."""
        most = self.context.max_seq_len
        if not tokens:
            raise RuntimeFault(where, "no tokens", "at least one", "Give it some text, or the id of a first token.")
        if len(tokens) > most:
            todo = "Shorten it, or build the bundle with a larger engine.max_seq_len."
            raise RuntimeFault(where, f"{len(tokens)} tokens", f"at most {most}", todo)
        self.check_vocabulary(where, tokens)

    def check_vocabulary(self, where: str, tokens: Sequence[int]) -> None:
        """Refuses token ids that are not of the target's vocabulary. Raises RuntimeFault, which names the first."""
        vocab = self.verifier.engine.spec.vocab_size
        if not tokens:
            return
        if min(tokens) < 0 or (vocab and max(tokens) >= vocab):
            wrong = next(token for token in tokens if not 0 <= token < vocab)
            raise RuntimeFault(where, f"token {wrong}", f"ids from 0 to {vocab - 1}", "Use the bundle's own tokenizer.")

    def _generation(self, sequence: TokenSequence, last: StepOutput) -> Generation:
        tokens = sequence.tokens[sequence.num_prompt :]
        if sequence.sink is not None:
            text = sequence.sink.text
        else:
            prompt = sequence.tokens[: sequence.num_prompt]
            text = text_of_tokens(self.tokenizer, tokens, prompt) if self.tokenizer is not None else ""
        logprobs = None if sequence.sampling.logprobs is None else sequence.logprobs
        told = None if sequence.sampling.prompt_logprobs is None else sequence.prompt_logprobs
        return Generation(text, tokens, str(last.finish_reason), last.stats or {}, last.error, logprobs, told)
