# SPDX-License-Identifier: Apache-2.0
"""Load a bundle and decode with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from speccompile.core import registry
from speccompile.core.jobs import MethodContext, StepCosts
from speccompile.core.protocols import Engine, Proposer
from speccompile.core.sampling import SamplingParams
from speccompile.errors import BundleError, RuntimeFault
from speccompile.runtime.bundle import Bundle, read_bundle
from speccompile.runtime.loop import decode
from speccompile.runtime.slots import Slot, Slots, Step
from speccompile.runtime.stats import TimedEngine
from speccompile.runtime.text import TextSink
from speccompile.runtime.verifier import Verifier

TARGET, ROLLBACK = "target", "rollback"
Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Generation:
    """What decoding one prompt gave.

    Args:
        text: of the new tokens, special tokens left out, cut before a stop string.
        tokens: new token ids; a stop token is the last of them.
        finish_reason: `stop`, `length` or `cache_full`.
        stats: see `SlotStats.json_from_stats`.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    stats: dict[str, Any]

    def json_from_generation(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


class SpecEngine:
    """A target with its proposer. One run at a time: a new one ends those that were not read to their end.

    Args:
        target: the target's engine (`verified_spec`).
        drafts: the method's engines by name.
        proposer: the method's proposer over the same engines.
        tokenizer: None where prompts and results are token ids.
        context: sizes.
        eos_token_ids: the model's own ends.
        defaults: sampling where a request says nothing.
        bundle: where it came from.
        chunk: prompt tokens read at once.
    """

    def __init__(
        self,
        target: TimedEngine,
        drafts: Mapping[str, TimedEngine],
        proposer: Proposer,
        tokenizer: Tokenizer | None,
        context: MethodContext,
        eos_token_ids: Sequence[int] = (),
        defaults: SamplingParams | None = None,
        bundle: Bundle | None = None,
        chunk: int = 128,
    ) -> None:
        self.tokenizer, self.context, self.bundle = tokenizer, context, bundle
        self.defaults = defaults or SamplingParams()
        self.eos_token_ids = frozenset(eos_token_ids)
        self.verifier = Verifier(target, context.max_seq_len, chunk)
        self.proposer = proposer
        self._plain = registry.method("none")
        self._engines = (target, *drafts.values())
        self._run = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculative: bool = True,
        batch_size: int | None = None,
    ) -> list[Generation]:
        """Decode prompts to their ends.

        Args:
            prompts: one or more texts, or lists of token ids.
            sampling: for all prompts, or one for each; None: the bundle's defaults.
            speculative: False decodes with the target alone.
            batch_size: sequences decoded at once; None: as many as the bundle was built for.

        Returns:
            One generation a prompt, in their order.

        Raises:
            RuntimeFault: a prompt is empty, too long or not of the vocabulary; the message has its index.
        """
        slots = self._make_slots(prompts, sampling, with_text=False)
        reasons = [""] * len(slots)
        for steps in self._decode(slots, speculative, batch_size):
            for step in steps:
                if step.finish_reason:
                    reasons[step.prompt_index] = step.finish_reason
        return [self._generation(slot, reason) for slot, reason in zip(slots, reasons, strict=True)]

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, speculative: bool = True
    ) -> Iterator[Step]:
        """Decode one prompt step by step.

        Yields:
            Steps whose `text` is ready to show: never half a character, nothing of a stop string.

        Raises:
            RuntimeFault: as `generate`; or another run was started since the last step was read.
        """
        slots = self._make_slots([prompt], sampling, with_text=True)
        for steps in self._decode(slots, speculative, 1):
            yield steps[0]

    def stream_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculative: bool = True,
        batch_size: int | None = None,
    ) -> Iterator[Step | Generation]:
        """Decode prompts step by step: each one's steps, then its generation, as they come.

        Raises:
            RuntimeFault: as `stream`.
        """
        slots = self._make_slots(prompts, sampling, with_text=True)
        for steps in self._decode(slots, speculative, batch_size):
            for step in steps:
                yield step
                if step.finish_reason:
                    yield self._generation(slots[step.prompt_index], step.finish_reason)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer puts around it."""
        if self.tokenizer is None:
            raise RuntimeFault(
                "prompt", "a text", "token ids", "This bundle has no tokenizer: it was built from a config."
            )
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def _decode(self, slots: list[Slot], speculative: bool, batch_size: int | None) -> Iterator[list[Step]]:
        most = self.context.max_slots
        if batch_size is not None and not 1 <= batch_size <= most:
            raise RuntimeFault(
                "batch_size", str(batch_size), f"1 to {most}", "Build the bundle with a larger engine.max_batch_size."
            )
        self._run += 1
        run, proposer = self._run, self.proposer if speculative else self._plain.make_proposer(None, {}, self.context)
        for engine in self._engines:
            engine.reset()
        for steps in decode(self.verifier, proposer, Slots(slots, batch_size or most), self._engines):
            yield steps
            if run != self._run:
                raise RuntimeFault(
                    "stream",
                    "a newer run on the same engine",
                    "one run at a time",
                    "Load a second engine, or finish first.",
                )

    def _make_slots(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        with_text: bool,
    ) -> list[Slot]:
        is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        given = cast("Sequence[Prompt]", [prompts] if is_one else prompts)
        asked = [sampling or self.defaults] * len(given) if not isinstance(sampling, Sequence) else sampling
        if len(asked) != len(given):
            raise RuntimeFault("sampling", f"{len(asked)} entries", f"{len(given)}, as many as prompts", "Match them.")
        return [
            self._make_slot(i, p, params, with_text) for i, (p, params) in enumerate(zip(given, asked, strict=True))
        ]

    def _make_slot(self, index: int, prompt: Prompt, params: SamplingParams, with_text: bool) -> Slot:
        tokens = self.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        self._check_prompt(index, tokens)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_token_ids)
        sink = None
        if self.tokenizer is not None and (with_text or params.stop):
            sink = TextSink(self.tokenizer, params.stop)
        elif params.stop:
            raise RuntimeFault(f"prompt {index}", "stop strings", "a bundle with a tokenizer", "Use stop_token_ids.")
        return Slot(index, tokens, params, stop_ids, sink)

    def _check_prompt(self, index: int, tokens: list[int]) -> None:
        where, most = f"prompt {index}", self.context.max_seq_len
        if not tokens:
            raise RuntimeFault(where, "no tokens", "at least one", "Give it some text, or the id of a first token.")
        if len(tokens) > most:
            todo = "Shorten it, or build the bundle with a larger engine.max_seq_len."
            raise RuntimeFault(where, f"{len(tokens)} tokens", f"at most {most}", todo)
        vocab = self.verifier.engine.spec.vocab_size
        if min(tokens) < 0 or (vocab and max(tokens) >= vocab):
            wrong = next(token for token in tokens if not 0 <= token < vocab)
            raise RuntimeFault(where, f"token {wrong}", f"ids from 0 to {vocab - 1}", "Use the bundle's own tokenizer.")

    def _generation(self, slot: Slot, reason: str) -> Generation:
        tokens = slot.tokens[slot.num_prompt :]
        if slot.sink is not None:
            text = slot.sink.text
        else:
            text = self.tokenizer.decode(tokens, skip_special_tokens=True) if self.tokenizer is not None else ""
        return Generation(text, tokens, reason, slot.stats.json_from_stats())


def load(
    path: Path | str,
    *,
    backend: str | None = None,
    threads: int | None = None,
    method: str | Mapping[str, Any] | None = None,
    verify: bool = True,
) -> SpecEngine:
    """Load a bundle.

    Args:
        path: its folder.
        backend: a backend other than the one it was built for.
        threads: threads of the target's engine; None: as measured when it was built.
        method: another speculation method than the recipe's, as a name or as a speculator section; it can use
            the graphs that are in the bundle.
        verify: compare every file with its digest.

    Raises:
        BundleError: the bundle is incomplete or was changed, or the method needs a graph that is not in it.
        RecipeError: there is no such backend or method.
    """
    bundle = read_bundle(path, verify)
    recipe = bundle.recipe
    sizes = recipe["engine"]
    name, config = _method_config(recipe["speculator"], method)
    chosen = registry.method(name)
    jobs = chosen.graph_jobs(config)
    missing = [job.name for job in jobs if job.name not in bundle.graphs]
    if missing:
        todo = f"Build a bundle whose recipe has speculator.method: {name}."
        raise BundleError(str(bundle.path), f"no graph {missing[0]!r}", f"the graphs of method {name}", todo)
    context = _context(bundle, [job.name for job in jobs])
    engines = {
        graph: TimedEngine(_load_engine(bundle, graph, backend or sizes["backend"], context, threads))
        for graph in (TARGET, *(job.name for job in jobs))
    }
    drafts = {graph: engine for graph, engine in engines.items() if graph != TARGET}
    tokenizer_path = bundle.tokenizer_path
    return SpecEngine(
        engines[TARGET],
        drafts,
        chosen.make_proposer(config, drafts, context),
        None if tokenizer_path is None else Tokenizer.from_file(str(tokenizer_path)),
        context,
        bundle.manifest["eos_token_ids"],
        _defaults(recipe.get("decoding", {})),
        bundle,
    )


def _method_config(section: Mapping[str, Any], override: str | Mapping[str, Any] | None) -> tuple[str, Any]:
    """The method's name and its `Config`; an override of the same method keeps the recipe's other fields."""
    wanted = {"method": override} if isinstance(override, str) else dict(override or {})
    name = str(wanted.get("method", section["method"]))
    merged = {**section, **wanted} if name == section["method"] else wanted
    config_class = registry.method(name).Config
    known = {f.name for f in fields(config_class)}
    unknown = sorted(set(merged) - known - {"method"})
    if unknown:
        raise BundleError(
            f"speculator.{unknown[0]}", "an unknown field", f"one of {', '.join(sorted(known))}", "Remove it."
        )
    try:
        return name, config_class(**{key: value for key, value in merged.items() if key != "method"})
    except TypeError as fault:
        raise BundleError(
            f"method {name}", str(fault), "all its fields", "Pass them: method={'method': ...}."
        ) from fault


def _context(bundle: Bundle, jobs: list[str]) -> MethodContext:
    sizes, graphs = bundle.recipe["engine"], bundle.graphs
    max_seq_len = int(sizes["max_seq_len"])
    limits = {
        g: min(max_seq_len, int(graphs[g].get("dims", {}).get("max_positions") or max_seq_len)) for g in (TARGET, *jobs)
    }
    return MethodContext(
        max_slots=int(sizes["max_batch_size"]),
        max_seq_len=limits[TARGET],
        max_draft_nodes=int(sizes["max_draft_nodes"]),
        costs={g: StepCosts.from_json(graphs[g].get("tuning", {})) for g in (TARGET, *jobs)},
        seq_lens=limits,
    )


def _load_engine(bundle: Bundle, graph: str, backend: str, context: MethodContext, threads: int | None) -> Engine:
    record = bundle.graphs[graph]
    tuning = dict(record.get("tuning", {}))
    if threads is not None and graph == TARGET:
        tuning["threads"] = threads
    # Nodes that pad a ragged batch need rows behind the last that a sequence may use.
    max_rows = context.seq_lens[graph] + context.max_draft_nodes + 1
    rollback = bundle.graph_path(ROLLBACK) if graph == TARGET and ROLLBACK in bundle.graphs else None
    engine: Engine = registry.backend(backend).load(
        bundle.graph_path(graph),
        bundle.graph_spec(graph),
        max_slots=context.max_slots,
        max_rows=max_rows,
        tuning=tuning,
        rollback=rollback,
        device=bundle.recipe["engine"].get("device", "cpu"),
    )
    return engine


def _defaults(decoding: Mapping[str, Any]) -> SamplingParams:
    known = {f.name for f in fields(SamplingParams)}
    given = {key: value for key, value in decoding.items() if key in known and value is not None}
    return SamplingParams(**{**given, "stop": tuple(given.get("stop", ()))})
