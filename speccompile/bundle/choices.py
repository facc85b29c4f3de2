# SPDX-License-Identifier: Apache-2.0
"""What a plan leaves open: dtype, whether quantised weights are kept, drafts that may not pay, text to choose forms."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from speccompile.backends.base import Backend
from speccompile.checkpoints.checkpoint import read_config, read_text_config, special_tokens
from speccompile.checkpoints.folders import find_config
from speccompile.checkpoints.safetensors import read_header
from speccompile.checkpoints.tensor_files import has_grids
from speccompile.checkpoints.texts import MESSAGES, TOKENIZER, Texts, TextSample, tokens_from_file
from speccompile.common.chat_prompts import read_chats, tokens_of_messages
from speccompile.common.tokenizer_file import load_tokenizer
from speccompile.core import registry
from speccompile.core.jobs import STORED, GraphJob, StepCosts
from speccompile.core.protocols import GraphSource
from speccompile.core.registry import Method
from speccompile.errors import BundleError, CheckpointError, RecipeError, RuntimeFault
from speccompile.graph_kinds.int8_caches import INT8
from speccompile.recipe.models import AUTO_TEXTS, NO_TEXTS
from speccompile.recipe.plan import AUTO, FLOATS, TARGET, BuildPlan, draft_form


def complete_plan(plan: BuildPlan) -> BuildPlan:
    """Returns the plan with all that it left open; a complete one is returned as it is."""
    return choose_stored(choose_dtype(plan))


def choose_stored(plan: BuildPlan) -> BuildPlan:
    """Returns the plan with weights as they are stored, where that or `auto` is asked for: levels, or else floats."""
    backend: Backend = registry.backend(plan.engine.backend, plan.engine.device)
    if plan.weights != "checkpoint" or STORED not in backend.quantizations:
        return plan
    target, asked = _stored(plan.target), dict(plan.open_drafts)
    drafts = []
    for job in plan.drafts:
        if (form := asked.get(job.name)) is not None:
            job = replace(job, quantization=draft_form(form, target.quantization, backend))
            job = _stored(job, is_open=form == AUTO and job.model != plan.target.model)
        drafts.append(_stored(job))
    return replace(plan, target=target, drafts=tuple(drafts), open_drafts=())


def _stored(job: GraphJob, *, is_open: bool = False) -> GraphJob:
    if job.quantization not in (AUTO, STORED) and not is_open:
        return job
    if has_grids(find_config(job)):
        return replace(job, quantization=STORED)
    return replace(job, quantization="none") if job.quantization == STORED else job


def choose_dtype(plan: BuildPlan) -> BuildPlan:
    """Returns the plan with the dtype that its backend chooses for the target's checkpoint, where it was left open."""
    if not plan.chooses_dtype:
        return plan
    folder = find_config(plan.target)
    backend: Backend = registry.backend(plan.engine.backend, plan.engine.device)
    model_type = str(read_text_config(folder).get("model_type"))
    dtype = backend.choose_dtype(stored_dtype(folder), model_type, plan.options)
    return replace(plan, dtype=dtype, chooses_dtype=False)


def stored_dtype(folder: Path) -> str | None:
    """Returns the dtype of a checkpoint's weights; None: neither its config nor its tensors say."""
    for held in (read_text_config(folder), read_config(folder)):
        for name in ("dtype", "torch_dtype"):
            if isinstance(held.get(name), str):
                return str(held[name]).removeprefix("torch.")
    for file in sorted(folder.glob("*.safetensors"))[:1]:
        counts = Counter(tensor.dtype for tensor in read_header(file).values())
        return {"F16": "float16", "BF16": "bfloat16"}.get(counts.most_common(1)[0][0]) if counts else None
    return None


MAX_SHARE = 1 / 3  # of the target's bytes
MAX_CHAIN = 10
ACCEPTED = 0.9  # of a self-draft on SmolLM2's answers 0.88 were accepted (docs/lab/2026-11-28-self-draft.md)


def why_left_out(job: GraphJob, records: Mapping[str, Any], sizes: Mapping[str, int]) -> str | None:
    """Returns why a draft with a `min_gain` does not pay, by what is known yet of the graphs; None: nothing says so."""
    if not job.min_gain:
        return None
    target, own = records[TARGET], records.get(job.name)
    if (form := target.get("quantization", "none")) not in FLOATS:
        return f"the target's weights are {form}, not floats"
    if own is None:
        return None
    if (share := sizes[job.name] / sizes[TARGET]) > MAX_SHARE:
        return f"its files are {share:.0%} of the target's, more than a third"
    gain = promised_gain(*(StepCosts.from_json(record["tuning"]) for record in (target, own)))
    if gain < job.min_gain:
        return f"the measured times promise {gain:.2f} times plain decoding, less than {job.min_gain}"
    return None


def promised_gain(target: StepCosts, draft: StepCosts) -> float:
    """Returns tokens/s to plain decoding of the best chain where `ACCEPTED` drafts are right; unknown: infinity."""
    # A chain of n drafts brings 1 + a + ... + a^n tokens in n draft runs and a step of n + 1 nodes.
    if not (target.ms_by_nodes and draft.ms_by_nodes):
        return math.inf
    tokens, best = 1.0, 0.0
    for num in range(1, MAX_CHAIN + 1):
        tokens += ACCEPTED**num
        best = max(best, tokens * target.ms(1) / (target.ms(num + 1) + num * draft.ms(1)))
    return best


def with_drafts_of(plan: BuildPlan, graphs: Collection[str]) -> BuildPlan:
    """Returns the plan without the drafters that were left out: those of a `min_gain` whose graph is not there."""
    left = {job.name for job in plan.drafts if job.min_gain} - set(graphs)
    if not left:
        return plan
    section = plan.recipe_from_plan()["speculator"]
    parts = [(one, *_method_of(one)) for one in section.get("drafters", [section])]
    kept = [one for one, method, config in parts if not left & {job.name for job in method.graph_jobs(config)}]
    method, config = _method_of(registry.section_of(kept))
    drafts = tuple(job for job in plan.drafts if job.name not in left)
    return replace(plan, method=method.name, speculator=config, drafts=drafts)


def _method_of(section: Mapping[str, Any]) -> tuple[Method, Any]:
    method = registry.method(section["method"])
    return method, method.Config(**{key: value for key, value in section.items() if key != "method"})


MAX_TOKENS = 32768  # read of a file: more text takes longer and was not seen to help
MIN_TOKENS = 256
_KEY = "target.calibration"
_SHORT = f"Give more text, or {AUTO_TEXTS} to draw it from the model."


def sample_of(plan: BuildPlan, job: GraphJob, source: GraphSource, backend: Backend) -> TextSample | None:
    """Returns the text of a target: the user's file, else the prompts of the package as its chat template has them.

    None for drafts, random weights, and weights as they are with float caches. Weights are rounded in a target whose
    draft shares them.

    Raises:
        RecipeError: the file cannot be read, or does not hold enough text.
    """
    is_given = plan.calibration not in (AUTO_TEXTS, NO_TEXTS)
    has_forms = job.quantization not in ("none", "stored") or is_given or plan.engine.kv_cache == INT8
    if job.name != TARGET or plan.weights != "checkpoint" or not backend.calibrates or not has_forms:
        return None
    weights: Any = "rounded" if plan.calibration == NO_TEXTS else "compensated"
    if any(_shares_weights(draft, job) for draft in plan.drafts):
        weights = "as drafts"
    if is_given:
        path = Path(plan.calibration)
        texts = read_texts(path, source.folder, source.dims.vocab_size)
        if not _are_prompts(path):
            return TextSample(texts, source="given", weights=weights)
        told, prompts = "the target's answers to given prompts", texts
    else:
        told, prompts = "the target's answers to prompts", _chat_prompts(source.folder, source.dims.vocab_size)
    if not prompts:
        return TextSample(weights=weights)
    return TextSample((), prompts, tuple(special_tokens(source.folder)[0]), told, weights)


def _shares_weights(draft: GraphJob, target: GraphJob) -> bool:
    return bool(registry.find_class(draft.source).shares_weights) and draft.quantization == target.quantization


def read_texts(path: Path, folder: Path, vocab_size: int) -> Texts:
    """Returns the first `MAX_TOKENS` tokens of a file, `MIN_TOKENS` at least; see `texts.tokens_from_file`."""

    def chat(tokenizer: Any, messages: list[Any], where: str) -> list[int]:
        try:
            return tokens_of_messages(tokenizer, folder, messages)
        except (BundleError, RuntimeFault) as fault:
            raise RecipeError(f"{_KEY}: {where} ({fault.where})", fault.got, fault.expected, fault.todo) from fault

    return tokens_from_file(_KEY, path, folder, vocab_size, (MIN_TOKENS, MAX_TOKENS), _SHORT, chat)


def _are_prompts(path: Path) -> bool:
    first = next((line for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()), "")
    messages: Any = json.loads(first).get(MESSAGES) if path.suffix == ".jsonl" else None
    return bool(messages) and messages[-1]["role"] != "assistant"


def _chat_prompts(folder: Path, vocab_size: int) -> Texts:
    if not (folder / TOKENIZER).exists():
        return ()
    tokenizer = load_tokenizer(folder / TOKENIZER, CheckpointError, "Download the file again.")
    try:
        prompts = [tuple(tokens_of_messages(tokenizer, folder, chat.messages)) for chat in read_chats()]
    except (BundleError, RuntimeFault):  # no template, no package for it, or one that takes other messages
        return ()
    return tuple(prompts) if all(ids and max(ids) < vocab_size for ids in prompts) else ()
