# SPDX-License-Identifier: Apache-2.0
"""Manifests of builds that did not record what a graph says of itself are read as if they had."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from speccompile.core.borrowed_specs import reading_spec
from speccompile.core.feature_specs import FeatureDims, feature_draft_spec, fusion_spec
from speccompile.core.heads_specs import guessing_heads_spec, tree_heads_spec
from speccompile.core.older_specs import SAMPLE_TAIL
from speccompile.core.specs import (
    ModelDims,
    TensorSpec,
    decoder_spec,
    guessing_spec,
    heads_spec,
    rollback_spec,
    spec_from_json,
    verified_spec,
)

SIZES = ("llama", 97, 16, 1, 2, 1, 8, 64)
DIMS = ModelDims(*SIZES)
FEATURES = FeatureDims(*SIZES, target_hidden_size=16, layers=(0, 1, 2))
DECODER = replace(decoder_spec("draft", DIMS), max_rows=64)
SPECS = {
    "target": verified_spec(decoder_spec("target", DIMS, hidden=True, hidden_layers=(1, 2))),
    "target with logits": verified_spec(decoder_spec("target", DIMS), keep_logits=True),
    "draft": guessing_spec(DECODER, 1, laws=True),
    "candidates": guessing_spec(DECODER, 4, laws=False),
    "candidates and probs": guessing_spec(reading_spec(DECODER, DIMS, ("k_cache.0",)), 4, laws=True),
    "draft on features": feature_draft_spec("draft", FEATURES, 4, True, 64),
    "fusion": fusion_spec("fusion", FEATURES),
    "heads of a chain": heads_spec("heads", 16, 97, 3),
    "heads of a tree": tree_heads_spec("heads", 16, 97, 12, gives_parents=True),
    "heads of candidates": guessing_heads_spec("heads", 16, 97, 4, 10),
    "rollback": rollback_spec(DIMS),
}
RECENT = ("rows_written_ahead", "reads_prompts", "scores", "num_candidates", "num_drafts", "gives_probs", "tail")


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_of_an_earlier_build_is_completed(name: str) -> None:
    spec = SPECS[name]
    written = json.loads(json.dumps(spec.json_from_spec()))
    assert spec_from_json(written) == spec
    older = {key: value for key, value in written.items() if key not in RECENT}
    for key in ("inputs", "outputs"):
        older[key] = [{"name": t["name"], "dims": t["dims"], "dtype": t["dtype"]} for t in written[key]]
    assert spec_from_json(older) == spec


def test_names_decide_nothing_where_the_build_recorded_what_the_graph_is() -> None:
    odd = replace(SPECS["draft"], scores="nodes", num_drafts=5, tail="none", gives_probs=False)
    assert spec_from_json(json.loads(json.dumps(odd.json_from_spec()))) == odd


def test_a_draft_that_drew_one_token_a_run_is_read() -> None:
    """Its target still decodes; the method that drafts with it refuses it."""
    plain = replace(DECODER, outputs=DECODER.outputs[1:], scores="one", gives_probs=True)
    drawn = (TensorSpec("sampled_token", ("batch",), "int64"), TensorSpec("sampled_probs", ("batch", 97), "float32"))
    spec = replace(plain, outputs=(*drawn, *plain.outputs))
    inputs = tuple(replace(t, probe="last_node") if t.name == "scored_nodes" else t for t in spec.inputs)
    spec = replace(spec, inputs=inputs)
    written = {**json.loads(json.dumps(spec.json_from_spec())), "tail": SAMPLE_TAIL}
    assert spec_from_json(written) == spec
    older = {key: value for key, value in written.items() if key not in RECENT}
    for key in ("inputs", "outputs"):
        older[key] = [{"name": t["name"], "dims": t["dims"], "dtype": t["dtype"]} for t in written[key]]
    assert spec_from_json(older) == spec
