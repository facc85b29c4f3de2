# SPDX-License-Identifier: Apache-2.0
"""Greedy equality with transformers, and tokens per second, of a bundle on this machine's GPU.

Where torch and transformers are there, transformers decodes on the same GPU in float32 without TF32, and a
differing prompt is reported as a tie or a fault by the gap of its two candidate logits. Without them the tokens that
transformers gave on a CPU (tests/e2e/golden/greedy.json) are the reference.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import speccompile
from bench.gpu_check.report import row
from speccompile.core.sampling import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples/models/pycode-16m"
METHODS = ("none", "draft_model", "ngram")
PAIR, HYBRID, PLAIN = "pycode", "pycode-hybrid-mtp", "pycode-plain"  # recipes
HYBRID_MODEL = ROOT / "examples/models/pycode-hybrid"  # its tokenizer is that of MODEL
NUM_TOKENS, BATCHES = 128, (1, 8)
NUM_TIMED, ROUNDS = 16, 3


def golden_rows() -> list[dict[str, Any]]:
    """Returns prompts and transformers' tokens: [{"prompt_ids", "tokens"}]."""
    rows: list[dict[str, Any]] = json.loads((ROOT / "tests/e2e/golden/greedy.json").read_text(encoding="utf-8"))
    return rows


class Reference:
    """transformers on the GPU; None of it without torch, transformers or a GPU that torch can use.

    Args:
        model: folder of the target.
    """

    def __init__(self, model: Path = MODEL) -> None:
        self.model: Any = None
        if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
            return
        import torch
        from transformers import AutoModelForCausalLM

        if not torch.cuda.is_available():
            return
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval().cuda()

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Returns the greedy continuation."""
        import torch

        ids = torch.tensor([list(prompt)], device="cuda")
        options = {"max_new_tokens": num_tokens, "do_sample": False, "pad_token_id": 2}
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        tokens: list[int] = out[0, ids.shape[1] :].tolist()
        return tokens

    def gap(self, prompt: Sequence[int], wanted: Sequence[int], got: Sequence[int]) -> float:
        """Returns the logit of the wanted token minus the other's where two continuations part; infinite if unknown."""
        if self.model is None:
            return float("inf")
        import torch

        at = next((i for i, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b), None)
        if at is None:
            return float("inf")  # one is longer than the other
        with torch.no_grad():
            logits = self.model(torch.tensor([[*prompt, *wanted[:at]]], device="cuda")).logits[0, -1]
        return float(logits[wanted[at]] - logits[got[at]])


def equality_rows(
    bundle: Path,
    wanted: Sequence[dict[str, Any]],
    reference: Reference,
    max_tie_gap: float,
    methods: Sequence[str | None] = METHODS,
) -> list[dict[str, Any]]:
    """Compares every method at every batch size with transformers.

    Args:
        bundle: of the example pair.
        wanted: [{"prompt_ids", "tokens"}].
        reference: distinguishes ties from faults.
        max_tie_gap: logits nearer than this may change their order in the bundle's precision.
        methods: None: the bundle's own.
    """
    rows, params = [], SamplingParams(max_new_tokens=NUM_TOKENS)
    prompts = [r["prompt_ids"] for r in wanted]
    for method in methods:
        engine = speccompile.load(bundle, method=method)
        for batch in BATCHES:
            results = engine.generate(prompts, params, batch_size=batch)
            differing = [i for i, r in enumerate(results) if r.tokens != wanted[i]["tokens"]]
            gaps = [reference.gap(prompts[i], wanted[i]["tokens"], results[i].tokens) for i in differing]
            is_right = all(abs(gap) <= max_tie_gap for gap in gaps)
            got = f"{len(prompts) - len(differing)} of {len(prompts)} prompts equal"
            if gaps:
                got += f", the others part at gaps of up to {max(map(abs, gaps)):.2g}"
            expected = f"all equal, or ties below {max_tie_gap:g}"
            rows.append(row(f"greedy tokens, {method or 'drafts'}, batch {batch}", got, expected, is_right))
    return rows


def reference_rows(reference: Reference) -> list[dict[str, Any]]:
    """Returns what transformers gives here; where it is not installed, what it gave on a CPU."""
    rows = golden_rows()
    if reference.model is None:
        return rows
    prompts = [r["prompt_ids"] for r in rows]
    return [{"prompt_ids": p, "tokens": reference.generate(p, NUM_TOKENS)} for p in prompts]


def speed_rows(
    bundle: Path, wanted: Sequence[dict[str, Any]], reference: Reference
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Measures tokens per second of plain decoding, speculation and transformers, interleaved; medians.

    Returns:
        Rows for the table, and all raw figures.
    """
    params = SamplingParams(max_new_tokens=96, ignore_eos=True)
    prompts = [r["prompt_ids"] for r in wanted[:NUM_TIMED]]
    engines = {"plain": speccompile.load(bundle, method="none"), "draft_model": speccompile.load(bundle)}
    rows, raw = [], {}
    for batch in BATCHES:
        figures: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(ROUNDS + 1):
            for name, engine in engines.items():
                start = time.perf_counter()
                results = engine.generate(prompts, params, batch_size=batch)
                if turn:  # the first round warms up
                    figures[name].append(sum(len(r.tokens) for r in results) / (time.perf_counter() - start))
        medians = {name: statistics.median(values) for name, values in figures.items()}
        raw[f"batch {batch}"] = figures
        for name, value in medians.items():
            rows.append(row(f"tokens/s, {name}, batch {batch}, prompts included", round(value, 1)))
        rows.append(row(f"draft_model / plain, batch {batch}", round(medians["draft_model"] / medians["plain"], 3)))
    if reference.model is not None:
        start, num = time.perf_counter(), 0
        for prompt in prompts:
            num += len(reference.generate(prompt, 96))
        rows.append(row("tokens/s, transformers fp32, batch 1", round(num / (time.perf_counter() - start), 1)))
    return rows, raw


def hybrid_rows(work: Path, name: str, max_tie_gap: float, *overrides: str) -> list[dict[str, Any]]:
    """Compares the example hybrid, plain and with its multi-token prediction module, with transformers; times both.

    Without transformers on this GPU, drafts are compared with the bundle's own plain decoding.

    Args:
        work: of bundles.
        name: of the bundle, to which "-hybrid" is added.
        max_tie_gap: see `equality_rows`.
        overrides: of the recipe.
    """
    bundle = build_bundle(work, f"{name}-hybrid", HYBRID, *overrides)
    reference, params = Reference(HYBRID_MODEL), SamplingParams(max_new_tokens=NUM_TOKENS)
    prompts = [r["prompt_ids"] for r in golden_rows()[:NUM_TIMED]]
    engines = {"plain": speccompile.load(bundle, method="none"), "drafts": speccompile.load(bundle)}
    if reference.model is None:
        texts = [r.tokens for r in engines["plain"].generate(prompts, params, batch_size=1)]
    else:
        texts = [reference.generate(prompt, NUM_TOKENS) for prompt in prompts]
    wanted = [{"prompt_ids": p, "tokens": t} for p, t in zip(prompts, texts, strict=True)]
    rows = equality_rows(bundle, wanted, reference, max_tie_gap, ("none", None))
    for batch in BATCHES:
        speeds = {}
        for kind, engine in engines.items():
            times = []
            for turn in range(ROUNDS + 1):
                start = time.perf_counter()
                results = engine.generate(prompts, params, batch_size=batch)
                if turn:  # the first round warms up
                    times.append(sum(len(r.tokens) for r in results) / (time.perf_counter() - start))
            speeds[kind] = statistics.median(times)
            rows.append(row(f"tokens/s, {kind}, batch {batch}", round(speeds[kind], 1)))
        rows.append(row(f"drafts / plain, batch {batch}", round(speeds["drafts"] / speeds["plain"], 3)))
    return [{**made, "what": f"hybrid: {made['what']}"} for made in rows]


def build_pair(work: Path, name: str, *overrides: str) -> Path:
    """Returns the example pair built for this machine: see `build_bundle`."""
    return build_bundle(work, name, PAIR, *overrides)


def wide_builder(work: Path, name: str, *overrides: str) -> Callable[[Path], Path]:
    """Returns what builds another checkpoint, without a speculator, as `build_bundle` does."""
    return lambda model: build_bundle(work, f"{name}-wide", PLAIN, *overrides, f"target.model={model}")


def build_bundle(work: Path, name: str, recipe: str, *overrides: str) -> Path:
    """Returns a recipe built for this machine; a bundle that lies in WORK/prebuilt/NAME is taken as it is."""
    prebuilt = work / "prebuilt" / name
    if prebuilt.is_dir():
        return prebuilt
    from speccompile.bundle.stage_cache import StageCache
    from speccompile.pipeline import build
    from speccompile.recipe import find_device, load_recipe, resolve

    plan = resolve(load_recipe(ROOT / f"recipes/{recipe}.yaml", overrides), find_device("cuda"))
    return build(plan, work / "bundles" / name, print, StageCache(work / "cache")).path
