# SPDX-License-Identifier: Apache-2.0
"""`speccompile doctor --probe`: a checkpoint's drafter runs on the target's own text, under every reading of its file.

The target writes greedily, and every token is the root of a chain, which counts up to its first draft that is not the
text's token. So drafts may follow the text's own tokens, and one run over a text gives all its chains.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from speccompile.certificate.prompts import TEXTS
from speccompile.checkpoints.folders import resolve_checkpoint
from speccompile.checkpoints.tensor_files import SPECULATOR_FILES
from speccompile.core.registry import find_class, load_formats
from speccompile.doctor.doctor import find_target, findings_from_case, open_known
from speccompile.doctor.key_checks import COMMON
from speccompile.doctor.layouts import Case
from speccompile.doctor.layouts import Target as Aim
from speccompile.doctor.probe import Probe, ProbeReport, Reading, accepted_drafts, compare_readings
from speccompile.errors import CheckpointError, RecipeError
from speccompile.training.states import batch_from_outputs
from speccompile.training.target import Target, keep_pages
from speccompile.training.text import read_tokenizer
from speccompile.training_contract import TargetNeeds, TargetParts, TrainingBatch

SECONDS = 60.0
MAX_PROMPT_TOKENS, MAX_NEW_TOKENS = 256, 96
_SHARE_OF_TEXTS = 0.3  # of the time, for the target's texts
_SHARE_OF_FIRST = 0.65  # of the time, when the first comparison has ended


@dataclass(frozen=True)
class ProbeText:
    """A text of the target."""

    batch: TrainingBatch
    num_prompt: int


class ProbeTarget:
    """A target in float32 with texts that it wrote after `prompts` (None: our own); none begins after `seconds`."""

    def __init__(
        self,
        name: str,
        prompts: Sequence[str | Sequence[int]] | None = None,
        max_new_tokens: int = MAX_NEW_TOKENS,
        seconds: float = SECONDS * _SHARE_OF_TEXTS,
    ) -> None:
        keep_pages()
        self.aim: Aim = find_target(name)
        self.folder = resolve_checkpoint(name)
        self.target = Target(self.folder, torch.float32)
        self.parts: TargetParts = self.target.parts(torch.zeros(self.target.dims.vocab_size, dtype=torch.int64))
        began, self.texts = time.monotonic(), list[ProbeText]()
        for ids in self._ids(TEXTS if prompts is None else prompts):
            if self.texts and time.monotonic() - began > seconds:
                break
            text = self._write(ids[-MAX_PROMPT_TOKENS:], max_new_tokens)
            if text.batch.tokens.shape[1] - text.num_prompt > 2:
                self.texts.append(text)
        if not self.texts:
            todo = "Give other prompts with --prompts."
            raise RecipeError("--prompts", "texts that end at once", "a prompt that the target goes on with", todo)

    def _ids(self, prompts: Sequence[str | Sequence[int]]) -> list[list[int]]:
        found = [p for p in prompts if not isinstance(p, str)]
        if len(found) < len(prompts):
            tokenizer, _ = read_tokenizer(self.folder)
            return [list(tokenizer.encode(p).ids) if isinstance(p, str) else list(p) for p in prompts]
        return [list(p) for p in found]

    def _write(self, prompt: list[int], num: int) -> ProbeText:
        model: Any = self.target.model
        ends = self.target.config.get("eos_token_id")
        stops = set(ends) if isinstance(ends, list) else {ends}
        tokens, fed, past = list(prompt), torch.tensor([prompt]), None
        with torch.no_grad():
            while len(tokens) < len(prompt) + num and (len(tokens) == len(prompt) or tokens[-1] not in stops):
                out = model(input_ids=fed, past_key_values=past, use_cache=True)
                past, fed = out.past_key_values, out.logits[:, -1:].argmax(-1)
                tokens.append(int(fed))
        whole = torch.tensor([tokens])
        held = self.target.run(whole, TargetNeeds(True, tuple(range(self.target.dims.num_layers))))
        return ProbeText(batch_from_outputs(whole, held, 0), len(prompt))


def probe_checkpoint(
    model: str,
    target: str,
    *,
    prompts: Sequence[str | Sequence[int]] | None = None,
    overrides: Mapping[str, Any] | None = None,
    seconds: float = SECONDS,
    progress: Callable[[str], None] = lambda message: None,
) -> ProbeReport:
    """Compares the readings of a checkpoint by acceptance on the target's text.

    Args:
        prompts: texts or token ids; None: our own.
        seconds: that it may take about; loading the target is not counted.

    Raises:
        CheckpointError: the speculator or the target cannot be read, or the layout declares no conventions.
    """
    case = open_probed(model, find_target(target), overrides)
    progress("probe: the target writes")
    return probe_case(case, ProbeTarget(target, prompts, seconds=seconds * _SHARE_OF_TEXTS), seconds, progress)


def open_probed(model: str, aim: Aim, overrides: Mapping[str, Any] | None = None) -> Case:
    """Returns a checkpoint whose keys, shapes and sizes have no fault, and whose layout declares conventions."""
    formats = load_formats()
    case = open_known(resolve_checkpoint(model, SPECULATOR_FILES), formats, aim, overrides)
    if not case.layout.probe:
        able = ", ".join(sorted({layout.method for layout in formats if layout.probe}))
        todo = "Its acceptance alone is measured by `speccompile verify`."
        raise CheckpointError(str(case.folder), case.layout.label, f"a drafter of {able}", todo)
    common = {check.name for check in COMMON}
    for fault in findings_from_case(case):
        if fault.severity == "error" and fault.check in common:
            todo = f"{fault.todo} The probe runs once keys and shapes are right."
            raise CheckpointError(fault.where, fault.got, fault.expected, todo)
    return case


def probe_case(
    case: Case, target: ProbeTarget, seconds: float = SECONDS, progress: Callable[[str], None] = lambda message: None
) -> ProbeReport:
    """Compares the readings of a checkpoint; see `probe_checkpoint`."""
    made: Probe = find_class(case.layout.probe)(case, target.parts)
    num = min(made.max_drafts, max(t.batch.tokens.shape[1] - t.num_prompt for t in target.texts) - 1)
    texts = [t for t in target.texts if t.batch.tokens.shape[1] - t.num_prompt > num]
    began, held = time.monotonic(), dict[tuple[str, int], np.ndarray]()

    def accepted(reading: Reading, index: int) -> np.ndarray:
        key = repr(reading), index
        if key not in held:
            text = texts[index]
            roots = torch.arange(text.num_prompt, text.batch.tokens.shape[1] - num)
            with torch.no_grad():
                drafts = made.draft(reading, text.batch, roots, num)
            held[key] = accepted_drafts(drafts.numpy(), text.batch.tokens[0].numpy(), roots.numpy())
        return held[key]

    def measure(readings: Sequence[Reading]) -> list[list[np.ndarray]]:
        most = seconds * _SHARE_OF_FIRST if not held else seconds
        counts: list[list[np.ndarray]] = [[] for _ in readings]
        for index in range(len(texts)):
            if index and time.monotonic() - began > most:
                break
            progress(f"probe: {len(readings)} readings, text {index + 1} of {len(texts)}")
            for count, reading in zip(counts, readings, strict=True):
                count.append(accepted(reading, index))
        return counts

    return compare_readings(made.conventions, measure, num)
