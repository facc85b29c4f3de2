# SPDX-License-Identifier: Apache-2.0
"""A training run: text -> target's outputs -> stage 1 -> stage 2 -> checkpoint, figures, plot."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from speccompile.bundle.format import SPECULATOR, write_record
from speccompile.bundle.staging import Claim, claim_folder, disk_faults, staged_folder
from speccompile.checkpoints.checkpoint import read_dims, read_text_config
from speccompile.checkpoints.folders import resolve_checkpoint
from speccompile.common.extras import install_command
from speccompile.errors import BuildError, RecipeError
from speccompile.recipe.models import Recipe
from speccompile.recipe.training import TrainingSection
from speccompile.recipe.training_plan import TrainingPlan, naming_defaults
from speccompile.training.bundle_target import BundleTarget
from speccompile.training.checkpoints import (
    EVENTS,
    STATES,
    RunRecord,
    check_run_folder,
    make_run_folder,
    open_record,
    save_record,
)
from speccompile.training.distributed import Team, join_team
from speccompile.training.joint import ADAPTER, JointModule, NoStates
from speccompile.training.losses import LossOptions, TrainedModule
from speccompile.training.plots import write_curves
from speccompile.training.stage import Stage, StageRunner, make_optimizer, measures_from_sums
from speccompile.training.states import (
    CachedStates,
    LiveStates,
    choose,
    digest_record,
    output_names,
    token_bytes,
    write_states,
)
from speccompile.training.target import Target, keep_pages
from speccompile.training.text import TextBook, cache_folder
from speccompile.training.windows import TRAIN, Windows, digest_from_json
from speccompile.training_contract import TargetNeeds
from speccompile.version import VERSION

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class Listener:
    """Callbacks for the progress of a run.

    Args:
        step: called after each step with the stage's name, the step, all its steps and the batch's measures.
        saved: called with the stage's name, its steps that are done and all of them where a checkpoint holds them.
    """

    stage: Callable[[str], None] = field(default=lambda message: None)  # called with "STAGE" and "STAGE: STEP"
    step: Callable[[str, int, int, dict[str, Any]], None] = field(default=lambda name, step, steps, row: None)
    saved: Callable[[str, int, int], None] = field(default=lambda name, step, steps: None)


def train(recipe: Recipe, plan: TrainingPlan, listener: Listener) -> dict[str, Any]:
    """Trains, or resumes a run; returns the record of training.json. `listener` hears the first process.

    Raises:
        RecipeError, CheckpointError, BuildError: see the parts; no partial output remains.
    """
    _check_extras()
    claim = claim_folder(plan.output, SPECULATOR)
    plan = replace(plan, output=claim.path)
    check_run_folder(_run_folder(plan))
    keep_pages()
    section = plan.section
    if section.threads != "auto":
        torch.set_num_threads(section.threads)
    with join_team(section.device) as team:
        active = listener if team.is_first else Listener()
        with naming_defaults(section):
            return _Run(recipe, plan, claim, team, active).run()


def _run_folder(plan: TrainingPlan) -> Path:
    return plan.output.with_name(plan.output.name + ".run")


class _Run:
    def __init__(self, recipe: Recipe, plan: TrainingPlan, claim: Claim, team: Team, listener: Listener) -> None:
        self.recipe, self.plan, self.section = recipe, plan, plan.section
        self.claim, self.team, self.listener = claim, team, listener
        self.folder = _run_folder(plan)
        self.precision = _DTYPES[self.section.precision]

    def run(self) -> dict[str, Any]:
        torch.manual_seed(self.section.seed)
        source = resolve_checkpoint(self.plan.target)
        self.listener.stage("target: load")
        book = TextBook(self.recipe, source, self.listener.stage)
        stages = [name for name in ("plain", "generated") if getattr(self.section, name).steps]
        _check_batches(self.section, stages, self.team.size)
        context = read_dims(source).max_positions
        _check_lengths(self.section, stages, 0, context)
        needs = self.plan.trainer.needs(self.plan.heads, read_text_config(source))
        target = self._target(source, book, needs, stages)
        trainable, parts = self._make(target, self._windows(book, stages[0]))
        _check_lengths(self.section, stages, trainable.num_positions, context)
        kind, is_chained = self.section.loss, self.section.chain_weights
        options = LossOptions(self.section.kl_share, self.section.decay, self.precision, kind, is_chained)
        trained = self._wrap(trainable, options, target, needs).to(self.section.device)
        module = self.team.shard(trained)
        optimizer = make_optimizer(module, self.section.weight_decay)
        record, change = self._open_record(stages, book)
        if record.model:
            self.team.load(module, optimizer, record.model, record.optimizer)
            self._report_start(stages, record, change)
        for index, name in list(enumerate(stages))[record.stage :]:
            windows = self._windows(book, name)
            is_begun = record.stage == index and record.step > 0
            stage = self._stage(name, windows, book, target, needs, is_begun)
            self._run_stage(index, stage, module, optimizer, record)
        state = self.team.model_state(module)
        if self.team.is_first:
            # Sharded parameters are no plain tensors: the result is written from a module of its own.
            fresh = self._wrap(self.plan.trainer.make(self.plan.heads, parts, None), options, target, needs)
            fresh.load_state_dict(state)
            self._write(fresh, record)
        self.team.wait()
        return self._summary(record)

    def _wrap(self, trainable: Any, options: LossOptions, target: Target, needs: TargetNeeds) -> Any:
        if self.section.joint is not None:
            return JointModule(trainable, options, target, needs, self.section.joint)
        return TrainedModule(trainable, options, target.dims.vocab_size)

    def _target(self, source: Path, book: TextBook, needs: TargetNeeds, stages: list[str]) -> Target:
        if self.section.outputs == "weights":
            return Target(source, self.precision, self.section.device)
        rows = max(getattr(self.section, name).seq_len for name in stages)
        folder = cache_folder() / "bundles" / digest_from_json([VERSION, book.target_record(), asdict(needs), rows])
        return BundleTarget(source, self.precision, self.recipe, needs, rows, folder, self.listener.stage)

    def _windows(self, book: TextBook, name: str) -> Windows:
        if self.team.is_first:
            book.windows(name)
        self.team.wait()
        return book.windows(name)

    def _make(self, target: Target, windows: Windows) -> tuple[Any, Any]:
        counts = torch.zeros(target.dims.vocab_size, dtype=torch.int64)
        for shard in range(windows.num_shards(TRAIN)):
            drafted = torch.from_numpy(windows.read(TRAIN, shard).learned_tokens()).long()
            counts += drafted.bincount(minlength=len(counts))
        parts = target.parts(counts)
        start = None if self.section.start is None else Path(self.section.start)
        return self.plan.trainer.make(self.plan.heads, parts, start), parts

    def _stage(
        self, name: str, windows: Windows, book: TextBook, target: Target, needs: TargetNeeds, is_begun: bool
    ) -> Stage:
        section = getattr(self.section, name)
        if self.section.joint is not None:
            return Stage(name, section, windows, NoStates(), self.section.seed, self.section.device)
        kept = digest_from_json(digest_record(target, book.files, book.digest(name), self.section.precision))
        folder = cache_folder() / "states" / kept
        passes = section.steps * section.batch_size / windows.counts[TRAIN]
        is_kept = [False]
        if self.team.is_first:
            self.listener.stage(f"{name}: choose where the target's outputs come from")
            wish = self.section.states
            if wish == "auto" and is_begun:  # what is kept has other digits, and would give another curve
                wish = _wish_of_note(self.folder, name)
            is_kept[0], facts = choose(folder, target, windows, needs, passes, wish)
            if is_kept[0]:
                size = token_bytes(target, needs) * windows.seq_len * sum(windows.counts.values())
                self.listener.stage(f"{name}: the target's outputs take {size / 2**30:.2f} GiB in {folder}")
                write_states(folder, target, windows, needs, self._report_states(name))
            _note(self.folder, name, {"kept": is_kept[0], **facts})
        self.team.wait()
        on_disk = self.team.total(torch.tensor(float(is_kept[0]), device=self.section.device)) > 0
        states = CachedStates(folder, output_names(needs)) if on_disk else LiveStates(target, needs)
        return Stage(name, section, windows, states, self.section.seed, self.section.device)

    def _report_states(self, name: str) -> Callable[[int, int], None]:
        return lambda done, total: self.listener.stage(f"{name}: the target's outputs {done}/{total}")

    def _open_record(self, stages: list[str], book: TextBook) -> tuple[RunRecord, str]:
        parts = zip(self.plan.stage_settings(stages), map(book.digest, stages), strict=True)
        used = {
            "target": book.files if self.section.outputs == "weights" else book.target_record(),
            "processes": self.team.size,
        }
        settings = [{"training": part, **used, "text": digest} for part, digest in parts]
        return open_record(self.folder, json.loads(json.dumps(settings)))

    def _report_start(self, stages: list[str], record: RunRecord, change: str) -> None:
        if change:
            self.listener.stage(f"{change}: what does not depend on it is kept")
        name = stages[min(record.stage, len(stages) - 1)]
        steps = getattr(self.section, name).steps
        step = record.step if record.stage < len(stages) else steps
        self.listener.stage(f"go on from the checkpoint in {self.folder}, {name} {step}/{steps}")
        self.listener.saved(name, step, steps)

    def _run_stage(self, index: int, stage: Stage, module: Any, optimizer: Any, record: RunRecord) -> None:
        section = self.section
        runner = StageRunner(stage, module, optimizer, self.team, self.precision, section.max_grad_norm)
        first, last = (record.step if record.stage == index else 0), stage.section.steps
        start, cpu_start = time.perf_counter(), time.process_time()
        if first == 0:
            self.listener.stage(f"{stage.name}: measure on held-out text")
            record.rows.append({"stage": stage.name, "step": 0, "held_out": _measures(stage.name, 0, runner.measure())})
        for step in range(first, last):
            own = _measures(stage.name, step + 1, runner.step(step))
            row = {"stage": stage.name, "step": step + 1, "train": own}
            is_last = step + 1 == last
            if is_last or (step + 1) % section.measure_every == 0:
                row["held_out"] = _measures(stage.name, step + 1, runner.measure())
            record.rows.append(row)
            self.listener.step(stage.name, step + 1, last, row)
            if is_last or (step + 1) % section.save_every == 0:
                now, cpu_now = time.perf_counter(), time.process_time()
                record.seconds[stage.name] = record.seconds.get(stage.name, 0.0) + now - start
                record.cpu_seconds[stage.name] = record.cpu_seconds.get(stage.name, 0.0) + cpu_now - cpu_start
                start, cpu_start = now, cpu_now
                record.stage, record.step = (index + 1, 0) if is_last else (index, step + 1)
                record.model = self.team.model_state(module)
                record.optimizer = self.team.optimizer_state(module, optimizer)
                if self.team.is_first:
                    save_record(self.folder, record)
                    self.listener.saved(stage.name, step + 1, last)
                self.team.wait()

    def _summary(self, record: RunRecord) -> dict[str, Any]:
        last = {row["stage"]: row["held_out"] for row in record.rows if "held_out" in row}
        plan = self.plan.json_from_plan()
        plan.pop("start")
        names = {"files": [Path(file).name for file in self.section.text.files]}  # no paths of this machine
        return {
            "plan": {**plan, "target": Path(self.plan.target).name, "text": {**plan["text"], **names}},
            "processes": self.team.size,
            "threads": torch.get_num_threads(),
            "seconds": {name: round(value, 3) for name, value in record.seconds.items()},
            "cpu_seconds": {name: round(value, 3) for name, value in record.cpu_seconds.items()},
            "held_out": last,
            **({"frontier": self._frontier(record)} if self.section.joint is not None else {}),
        }

    def _frontier(self, record: RunRecord) -> list[dict[str, Any]]:
        names = ("acceptance_length", "sampled_length", "kl", "perplexity", "base_perplexity")
        rows = [row for row in record.rows if "held_out" in row]
        return [{"stage": row["stage"], "step": row["step"], **{n: row["held_out"][n] for n in names}} for row in rows]

    def _write(self, trained: Any, record: RunRecord) -> None:
        self.listener.stage("write")
        with staged_folder(self.claim.path, self.claim.hold) as folder:
            trained.trainable.save(folder)
            summary = self._summary(record)
            if self.section.joint is not None:
                last = list(summary["held_out"].values())[-1]
                trained.save_adapter(folder / ADAPTER, Path(self.plan.target).name, last)
            text = json.dumps(summary, indent=1) + "\n"
            (folder / "training.json").write_text(text, encoding="utf-8")
            write_curves(record.rows, folder / "training.png", self.folder / EVENTS, self.plan.section.method)
            write_record(folder, SPECULATOR)


def _measures(stage: str, step: int, sums: torch.Tensor) -> dict[str, Any]:
    found = measures_from_sums(sums)
    for name, value in found.items():
        if not np.isfinite(value).all():
            todo = f"Lower training.{stage}.learning_rate." if step else "Check the target and training.start."
            raise BuildError(f"training.{stage}, step {step}", f"{name} {value}", "finite numbers", todo)
    return found


def _note(folder: Path, stage: str, facts: dict[str, Any]) -> None:
    with disk_faults(folder):
        make_run_folder(folder)
        path = folder / STATES
        known = json.loads(path.read_text()) if path.is_file() else {}
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps({**known, stage: facts}, indent=1))
        part.replace(path)


def _wish_of_note(folder: Path, stage: str) -> Literal["auto", "disk", "live"]:
    path = folder / STATES
    known: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    is_kept = known.get(stage, {}).get("kept")
    return "auto" if is_kept is None else "disk" if is_kept else "live"


def _check_batches(section: TrainingSection, stages: list[str], num_processes: int) -> None:
    for name in stages:
        size = getattr(section, name).batch_size
        if size % num_processes:
            expected = f"a multiple of the {num_processes} processes"
            raise RecipeError(f"training.{name}.batch_size", f"{size}", expected, "Change it, or their number.")
    if section.joint is not None and num_processes > 1:
        raise RecipeError("training.joint", f"{num_processes} processes", "one process", "Start it without torchrun.")


def _check_lengths(section: TrainingSection, stages: list[str], num_drafts: int, context: int) -> None:
    for name in stages:
        size = getattr(section, name).seq_len
        if not num_drafts < size <= context:
            limit = f"at most {context}, the target's context" if size > context else f"more than {num_drafts} drafts"
            raise RecipeError(f"training.{name}.seq_len", f"{size}", limit, "Change it.")


def _check_extras() -> None:
    missing = [name for name in ("matplotlib", "tensorboard") if importlib.util.find_spec(name) is None]
    if missing:
        expected = "the packages that plot and log a run"
        raise BuildError("train", f"no {missing[0]}", expected, f"Install them: {install_command('train')}.")
