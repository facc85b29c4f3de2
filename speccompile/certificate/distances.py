# SPDX-License-Identifier: Apache-2.0
"""Distance of the target's logits from transformers' in float32, on the prompts and their texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.backends.distance import Distance, compare, distance_from_rows
from speccompile.bundle.bundle import TARGET
from speccompile.certificate.checkpoint import Reference, dtype_of, is_exact
from speccompile.certificate.decoding import gives_logits
from speccompile.certificate.results import Check, check_of, not_run
from speccompile.core.specs import LENGTHS, LOGITS, TOKENS, all_sure
from speccompile.runtime.spec_engine import SpecEngine

DISTANCE = "distance"
MAX_KL_EXACT = 1e-6  # nats; only the order of sums differs
MAX_KL = 0.5  # of any form: beyond it is another model
CHUNK = 16  # tokens of a step


def logits_of(engine: SpecEngine, tokens: Sequence[int], chunk: int = CHUNK, start: int = 0) -> NDArray[np.float64]:
    """Returns the engine's logits after each token from `start` on, in steps of `chunk`: [tokens, vocab] float64."""
    target, rows = engine.verifier.engine, []
    engine.reset(len(tokens))
    for at, end in pairwise((*range(0, start, CHUNK), *range(start, len(tokens), chunk), len(tokens))):
        part = np.array([tokens[at:end]], dtype=np.int64)
        feeds = {TOKENS: part, LENGTHS: np.array([at], np.int64), **all_sure(target.spec, 1, part.shape[1])}
        logits = np.asarray(target.run(feeds)[LOGITS])[0]
        rows += [np.array(logits, dtype=np.float64)] if at >= start else []
    return np.concatenate(rows)


def check_distance(
    engine: SpecEngine,
    texts: Sequence[Sequence[int]],
    reference: Reference | None,
    why: str,
    manifest: Mapping[str, Any],
) -> Check:
    """Measures KL divergence and agreement of the likeliest token; states what the build measured beside it."""
    graph = manifest["graphs"][TARGET]
    form, quantization = graph.get("form"), graph.get("quantization", "none")
    facts: dict[str, Any] = {"form": form, "quantization": quantization, "dtype": dtype_of(dict(manifest))}
    built = (graph.get("form_distances") or {}).get(form)
    told = ""
    if built is not None:
        facts["measured_by_the_build"] = built
        told = f"; the build measured {Distance.from_json(built).summary()}, over other texts"
    if (cached := graph.get("cache_distance")) is not None:
        facts["int8_caches_measured_by_the_build"] = cached
        told += f"; of its int8 caches, from float32 ones, {Distance.from_json(cached).summary()}"
    if reference is None or not gives_logits(engine):
        return not_run(DISTANCE, (why if reference is None else "the target keeps its logits to itself") + told)
    vocab = min(engine.verifier.engine.spec.vocab_size, reference.vocab_size)
    rows = []
    for text in texts:
        wanted, got = reference.logits(text)[:-1, :vocab], logits_of(engine, text)[:-1, :vocab]
        rows.append(compare(wanted, got, np.array(text[1:], np.int64)))
    found = distance_from_rows(rows)
    exact = is_exact(dict(manifest))
    facts |= {"num_tokens": sum(map(len, texts)), "is_exact": exact, **asdict(found)}
    is_right = found.kl <= (MAX_KL_EXACT if exact else MAX_KL)
    kind = "float32" if exact else f"{quantization} weights, {facts['dtype']}"
    summary = f"{kind}, from transformers' float32 over {found.num_positions} positions: {found.summary()}{told}"
    return check_of(DISTANCE, is_right, summary, facts)
