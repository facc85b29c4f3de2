# SPDX-License-Identifier: Apache-2.0
"""Greedy equality with transformers, and tokens per second, of a bundle on this machine's GPU.

The tokens that transformers gave on a CPU (tests/e2e/golden/greedy.json) are the reference. Where torch and
transformers are there, a text that differs is a tie or a fault by one forward over it on the same GPU, in float32
without TF32: the most by which the logit of one of its tokens is below the highest.
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
NUM_PROMPTS, NUM_TOKENS, BATCHES = 72, 128, (1, 8)
NUM_TIMED, NUM_REFERENCE, ROUNDS = 16, 4, 3  # prompts timed, by transformers too; rounds after the first


def golden_rows() -> list[dict[str, Any]]:
    """Returns prompts and transformers' tokens, `NUM_TOKENS` at most: [{"prompt_ids", "tokens"}]."""
    rows = json.loads((ROOT / "tests/e2e/golden/greedy.json").read_text(encoding="utf-8"))
    return [{**r, "tokens": r["tokens"][:NUM_TOKENS]} for r in rows[:NUM_PROMPTS]]


class Reference:
    """transformers on the GPU; None of it without torch, transformers or a GPU that torch can use.

    Args:
        model: folder of the target.
    """

    def __init__(self, model: Path = MODEL) -> None:
        self.model: Any = None
        self.device = "cuda"
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

        ids = torch.tensor([list(prompt)], device=self.device)
        options = {"max_new_tokens": num_tokens, "do_sample": False, "pad_token_id": 2}
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        tokens: list[int] = out[0, ids.shape[1] :].tolist()
        return tokens

    def gap(self, prompt: Sequence[int], text: Sequence[int]) -> float:
        """Returns the most by which the logit of a token of the text is below the highest; infinite if unknown."""
        if self.model is None or not text:
            return float("inf")
        import torch

        with torch.no_grad():
            logits = self.model(torch.tensor([[*prompt, *text]], device=self.device), use_cache=False).logits[0]
        logits = logits[len(prompt) - 1 : -1].float()
        own = logits.gather(-1, torch.tensor(list(text), device=self.device)[:, None])[:, 0]
        return float((logits.max(-1).values - own).max())


def gap_of(reference: Reference, prompt: Sequence[int], wanted: Sequence[int], got: Sequence[int]) -> float:
    """Returns the gap of a text that differs; infinite where one of the two is the beginning of the other."""
    is_cut = list(wanted[: len(got)]) == list(got) or list(got[: len(wanted)]) == list(wanted)
    return float("inf") if is_cut else reference.gap(prompt, got)


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
            gaps = [gap_of(reference, prompts[i], wanted[i]["tokens"], results[i].tokens) for i in differing]
            is_right = all(gap <= max_tie_gap for gap in gaps)
            got = f"{len(prompts) - len(differing)} of {len(prompts)} prompts equal"
            if gaps:
                got += f", the others part at gaps of up to {max(gaps):.2g}"
            expected = f"all equal, or ties below {max_tie_gap:g}"
            rows.append(row(f"greedy tokens, {method or 'drafts'}, batch {batch}", got, expected, is_right))
    return rows


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
        reference.generate(prompts[0], 8)
        start, num = time.perf_counter(), 0
        for prompt in prompts[:NUM_REFERENCE]:
            num += len(reference.generate(prompt, 96))
        rows.append(row("tokens/s, transformers fp32, batch 1", round(num / (time.perf_counter() - start), 1)))
    return rows, raw


def hybrid_rows(work: Path, name: str, max_tie_gap: float, *overrides: str) -> list[dict[str, Any]]:
    """Compares the example hybrid with transformers, its drafts with plain decoding one by one; times both.

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
    texts = [r.tokens for r in engines["plain"].generate(prompts, params, batch_size=1)]
    rows = []
    if reference.model is not None:
        gap = max(reference.gap(prompt, text) for prompt, text in zip(prompts, texts, strict=True))
        got, expected = f"a gap of {gap:.2g} at most", f"at most {max_tie_gap:g}"
        rows.append(row("plain greedy texts, one forward of transformers", got, expected, gap <= max_tie_gap))
    wanted = [{"prompt_ids": p, "tokens": t} for p, t in zip(prompts, texts, strict=True)]
    rows += equality_rows(bundle, wanted, reference, max_tie_gap, ("none", None))
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
