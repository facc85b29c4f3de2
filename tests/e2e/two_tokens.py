# SPDX-License-Identifier: Apache-2.0
"""Whether sampled text follows the distribution that transformers computes: a chi-square over two tokens."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from speccompile.core.sampling import warp


def exact_dist(folder: Path, prompt: Sequence[int], heat: float, top_k: int) -> dict[tuple[int, int], float]:
    """Returns the probability of every pair of tokens after the prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def dist(*after: int) -> np.ndarray:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *after]])).logits[:, -1].numpy()
        return warp(logits, [heat], [top_k], [1.0])[0].astype(np.float64)

    first = dist()
    return {(int(a), int(b)): first[a] * p for a in np.flatnonzero(first) for b, p in enumerate(dist(int(a))) if p > 0}


def fit_p_value(results: Sequence[Any], dist: dict[tuple[int, int], float]) -> float:
    """Returns p of the chi-square test of the first two tokens of each result; 0 where a pair has no mass.

    Pairs expected fewer than eight times count as one.
    """
    num, counts = len(results), Counter(tuple(r.tokens[:2]) for r in results)
    if not set(counts) <= set(dist):
        return 0.0
    common = [pair for pair, mass in dist.items() if mass * num >= 8]
    got, wanted = [counts[pair] for pair in common], [num * dist[pair] for pair in common]
    rest = num - sum(wanted)
    if rest > 1e-3 * num or sum(got) < num:
        got, wanted = [*got, num - sum(got)], [*wanted, rest]
    return float(chisquare(got, wanted, sum_check=False).pvalue)
