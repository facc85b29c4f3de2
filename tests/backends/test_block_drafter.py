# SPDX-License-Identifier: Apache-2.0
"""A graph of an unknown kind is probed, sized, measured and checked by its declaration alone.

The kind: a drafter with a cache of its own that reads features and gives a block of tokens in one run. None of its
inputs and outputs except the rows in use has a name that another graph has.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from speccompile.backends import measuring
from speccompile.backends.base import LoadJob
from speccompile.backends.feeds import sizes_from_feeds
from speccompile.backends.measuring import measure_steps, measured_sizes
from speccompile.backends.onnxruntime.engine import load_engine
from speccompile.backends.tensorrt.profiles import make_profiles
from speccompile.backends.tensorrt.specs import tensorrt_spec
from speccompile.core.jobs import CompileOptions
from speccompile.core.protocols import Engine
from speccompile.core.specs import LENGTHS, GraphSpec, TensorSpec, probe_inputs, spec_from_json, updated_cache_name
from speccompile.errors import BuildError, RuntimeFault

pytestmark = pytest.mark.plan

VOCAB, WIDTH, BLOCK, MAX_ROWS = 31, 4, 6, 320
CACHES = tuple(
    TensorSpec(name, ("batch", 1, "max_seq", 8), "float32") for name in ("block_k_cache.0", "block_v_cache.0")
)
SPEC = GraphSpec(
    "block",
    (
        TensorSpec("block_features", ("batch", "nodes", WIDTH), "float32", "states"),
        TensorSpec("anchor", ("batch", 1), "int64", "tokens"),
        TensorSpec(LENGTHS, ("batch",), "int64", "lengths"),
        TensorSpec("anchor_node", ("batch",), "int64", "last_node"),
        *CACHES,
    ),
    (
        TensorSpec("block_tokens", ("batch", BLOCK), "int64"),
        *(TensorSpec(updated_cache_name(c.name), c.dims, c.dtype) for c in CACHES),
    ),
    tuple(c.name for c in CACHES),
    VOCAB,
    MAX_ROWS,
    rows_written_ahead=BLOCK,
    reads_prompts=True,
    scores="one",
    num_drafts=BLOCK,
)

# Token i of the block is the anchor, plus i + 1, plus the rows in use, plus the number of the features' signs: it
# depends on all that is fed. The caches are updated by nothing.
GRAPH = f"""
<ir_version: 10, opset_import: ["" : 23]>
block (float[batch, nodes, {WIDTH}] block_features, int64[batch, 1] anchor, int64[batch] {LENGTHS},
       int64[batch] anchor_node, float[batch, 1, max_seq, 8] {CACHES[0].name.replace(".", "_")},
       float[batch, 1, max_seq, 8] {CACHES[1].name.replace(".", "_")})
    => (int64[batch, {BLOCK}] block_tokens, float[batch, 1, max_seq, 8] k_updated,
        float[batch, 1, max_seq, 8] v_updated)
<int64[{BLOCK}] steps = {{1, 2, 3, 4, 5, 6}}, int64[1] one = {{1}}, int64[2] last = {{1, 2}}, int64 vocab = {{SIZE}}>
{{
    signs = Sign(block_features)
    counted = ReduceSum<keepdims = 0>(signs, last)
    rounded = Cast<to = 7>(counted)
    rows = Add({LENGTHS}, anchor_node)
    sums = Add(rows, rounded)
    column = Unsqueeze(sums, one)
    root = Add(anchor, column)
    chain = Add(root, steps)
    block_tokens = Mod(chain, vocab)
    k_updated = Identity({CACHES[0].name.replace(".", "_")})
    v_updated = Identity({CACHES[1].name.replace(".", "_")})
}}
"""


def check_block(engine: Engine, max_nodes: int) -> dict[str, Any]:
    """What the source of such a graph would have as `check_compiled`."""
    tokens = np.asarray(engine.run(probe_inputs(engine.spec, num_nodes=3, length=2))["block_tokens"])[0]
    if tokens.min() < 0 or tokens.max() >= engine.spec.vocab_size:
        raise BuildError(
            "check block", f"tokens {tokens.tolist()}", f"ids below {engine.spec.vocab_size}", "Report it."
        )
    return {"num_tokens": len(tokens)}


def load_block(folder: Path, spec: GraphSpec = SPEC, size: int = VOCAB) -> Any:
    model = onnx.parser.parse_model(GRAPH.replace("SIZE", str(size)))
    names = {c.name.replace(".", "_"): c.name for c in CACHES}
    names |= {"k_updated": updated_cache_name(CACHES[0].name), "v_updated": updated_cache_name(CACHES[1].name)}
    for value in (*model.graph.input, *model.graph.output):
        value.name = names.get(value.name, value.name)
    for node in model.graph.node:
        node.input[:] = [names.get(n, n) for n in node.input]
        node.output[:] = [names.get(n, n) for n in node.output]
    path = folder / f"block-{size}.onnx"
    onnx.save(model, path)
    slots, rows = measured_sizes(spec)
    return load_engine(LoadJob(path, spec, max_slots=slots, max_rows=rows, tuning={"threads": 1}))


def test_a_probe_feeds_what_the_spec_declares():
    feeds = probe_inputs(SPEC, num_slots=2, num_nodes=5, length=9)
    assert {name: value.shape for name, value in feeds.items()} == {
        "block_features": (2, 5, WIDTH),
        "anchor": (2, 1),
        LENGTHS: (2,),
        "anchor_node": (2,),
    }
    assert feeds[LENGTHS].tolist() == [9, 9] and feeds["anchor_node"].tolist() == [4, 4]
    assert feeds["anchor"].min() >= 0 and feeds["anchor"].max() < VOCAB
    assert feeds["block_features"].dtype == np.float32 and len(np.unique(feeds["block_features"])) == 2 * 5 * WIDTH
    sizes = sizes_from_feeds(SPEC, feeds)
    assert sizes == {"batch": 2, "nodes": 5, "scored": 1, "draft_vocab": 1}


def test_it_is_measured_and_checked_on_onnx_runtime(tmp_path, monkeypatch):
    for name in ("MIN_REPEATS", "MAX_REPEATS"):
        monkeypatch.setattr(measuring, name, 1)
    engine = load_block(tmp_path)
    assert measured_sizes(SPEC) == (1, measuring.CONTEXT + 16 + BLOCK)
    assert list(measure_steps(engine)) == [str(n) for n in measuring.NODE_COUNTS]
    assert check_block(engine, 9) == {"num_tokens": BLOCK}
    with pytest.raises(BuildError, match="check block"):
        check_block(load_block(tmp_path, size=10 * VOCAB), 9)


def test_rows_that_a_run_writes_ahead_must_fit(tmp_path):
    engine = load_block(tmp_path)
    last = engine.max_rows - BLOCK - 2
    engine.run(probe_inputs(SPEC, num_nodes=2, length=last))
    with pytest.raises(RuntimeFault, match=f"got {engine.max_rows + 1} cache rows"):
        engine.run(probe_inputs(SPEC, num_nodes=2, length=last + 1))
    careless = load_block(tmp_path, replace(SPEC, rows_written_ahead=0))
    careless.run(probe_inputs(SPEC, num_nodes=2, length=careless.max_rows - 2))


def test_tensorrt_gives_it_profiles_for_prompts_and_steps():
    spec = tensorrt_spec(SPEC, "float16", MAX_ROWS)
    prefill, decode = make_profiles(spec, CompileOptions("float16", max_slots=8, max_rows=MAX_ROWS, max_nodes=17))
    assert prefill.shapes(spec)["block_features"] == ((1, 1, WIDTH), (1, 128, WIDTH), (1, 128, WIDTH))
    assert decode.shapes(spec)["block_features"] == ((1, 1, WIDTH), (8, 1, WIDTH), (8, 17, WIDTH))
    assert "kv_rows" in decode.shapes(spec)  # it attends to the rows in use of its own cache


def test_a_manifest_keeps_what_it_declares():
    assert spec_from_json(json.loads(json.dumps(SPEC.json_from_spec()))) == SPEC
