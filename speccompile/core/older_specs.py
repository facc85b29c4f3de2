# SPDX-License-Identifier: Apache-2.0
"""Specs in manifests of builds that did not record what a graph says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SAMPLE_TAIL = "sample"  # of drafts that drew one token a run: such graphs are read, but no method drafts with them
_TAILS = {"path": "verify", "guesses": "candidates"}
_PROBES = {"tokens": "tokens", "lengths": "lengths", "feature_nodes": "nodes", "start_nodes": "last_node"}
_PROBS = ("sampled_probs", "sampled_laws", "node_laws")


def completed(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a spec's JSON with every field of `specs.GraphSpec`.

    What an earlier build left out follows from the names that its graphs had: those are known for good, and no graph
    of a later build is read so.
    """
    known = {"max_rows": 0, "draft_vocab": 0, "borrowed": (), **data}
    if "scores" in known:
        return {**known, "tail": "none"} if known.get("tail") == SAMPLE_TAIL else known
    inputs, outputs = ({row["name"]: row["dims"] for row in data[key]} for key in ("inputs", "outputs"))
    tail = next((tail for name, tail in _TAILS.items() if name in outputs), "none")
    is_heads = not data["caches"] and "start_nodes" in inputs
    is_sampled = "sampled_token" in outputs
    scores = "one" if is_heads or is_sampled else "nodes"
    probes = {**_PROBES, **({"scored_nodes": "last_node"} if is_sampled else {})}
    return {
        **known,
        "inputs": [{**row, "probe": _probe(row["name"], probes)} for row in data["inputs"]],
        "reads_prompts": "hidden.features" in outputs or ("tokens" in inputs and bool(data["caches"])),
        "scores": scores,
        "num_candidates": outputs["guesses"][2] if "guesses" in outputs else 0,
        "num_drafts": outputs["sampled_tokens"][1] if "sampled_tokens" in outputs else 0,
        "gives_probs": any(name in outputs for name in _PROBS),
        "tail": "none" if is_heads or "hidden.features" in inputs else tail,
    }


def _probe(name: str, probes: Mapping[str, str]) -> str:
    return "states" if name.split(".")[0] == "hidden" else probes.get(name, "neutral")
