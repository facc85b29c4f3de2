# SPDX-License-Identifier: Apache-2.0
"""A draft with candidates after every node: its tail, on every table and backend."""

import json
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

from speccompile.backends.base import CompileJob
from speccompile.backends.tensorrt.config import Config
from speccompile.backends.tensorrt.specs import tensorrt_spec
from speccompile.core import registry, specs
from speccompile.core.dims import ModelDims
from speccompile.core.jobs import CompileOptions
from speccompile.core.specs import spec_from_json
from speccompile.export.checks import check_candidates
from speccompile.graph_kinds.decoder import candidate_spec, decoder_spec
from speccompile.passes.base import run_pipeline
from speccompile.passes.pipelines import tensorrt_table
from tests import store
from tests.export.families import CONFIGS
from tests.lab.graphs import compile_graph
from tests.rtx import load_rtx

pytestmark = pytest.mark.export

CONFIG = {**CONFIGS["llama2"], "hidden_size": 64, "num_key_value_heads": 2, "num_hidden_layers": 1}
ROWS, NUM = 40, 5
TOKENS = np.array([[3, 1, 4, 1, 5]])
FEEDS = {specs.TOKENS: TOKENS, specs.LENGTHS: np.zeros(1, np.int64)}


@pytest.fixture(scope="module")
def neutral(tmp_path_factory: pytest.TempPathFactory) -> tuple[ir.Model, ModelDims]:
    folder = tmp_path_factory.mktemp("candidates")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return store.export_decoder(folder, weights="random", max_seq_len=ROWS)


@pytest.mark.parametrize("dists", [False, True])
def test_candidates_and_dists_are_those_of_the_logits(neutral, tmp_path, dists):
    model, dims = neutral
    plain, spec = decoder_spec("draft", dims), candidate_spec(decoder_spec("draft", dims), NUM, dists)
    assert spec_from_json(json.loads(json.dumps(spec.json_from_spec()))) == spec
    outputs = {}
    for name in ("onnxruntime", "reference"):
        for kind, wanted in (("logits", plain), ("candidates", spec)):
            folder = tmp_path / f"{name}-{kind}"
            form = "fp32" if name == "onnxruntime" else None
            engine = compile_graph(model, wanted, folder, name, form=form).open(2, max_rows=ROWS)
            outputs[kind] = {n: v.copy() for n, v in engine.run(FEEDS).items()}
        got, logits = outputs["candidates"], outputs["logits"][specs.LOGITS]
        probs = np.exp(logits - logits.max(-1, keepdims=True))
        probs /= probs.sum(-1, keepdims=True)
        assert got[specs.CANDIDATES].tolist() == np.argsort(-logits, axis=-1, kind="stable")[..., :NUM].tolist()
        np.testing.assert_allclose(got[specs.CANDIDATE_PROBS], -np.sort(-probs, axis=-1)[..., :NUM], atol=1e-6)
        assert check_candidates(engine) == {"num_tokens": NUM}
        if dists:
            assert got[specs.NODE_PROBS].shape == (1, 5, 1)
            heat = np.ones(1, np.float32)
            some = engine.run({**FEEDS, specs.TEMPERATURE: heat, specs.SCORED_NODES: np.array([[4, 1]])})
            np.testing.assert_allclose(some[specs.NODE_PROBS], probs[:, [4, 1]], atol=1e-6)


@pytest.mark.parametrize("dists", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_tensorrts_table_takes_it(neutral, dists, dtype):
    model, dims = neutral
    wanted = candidate_spec(replace(decoder_spec("draft", dims), draft_vocab=7), NUM, dists)
    if dists:
        assert tensorrt_spec(wanted, dtype, ROWS).output(specs.NODE_PROBS).dims == ("batch", "scored", 7)
    spec = tensorrt_spec(replace(wanted, draft_vocab=0), dtype, ROWS)
    work = model.clone()
    run_pipeline(work, tensorrt_table(spec, "none", dtype=dtype))
    tail = [n for n in work.graph if n.op_type in ("TopTokens", "NodeProbs")]
    assert [n.op_type for n in tail] == ["TopTokens", "NodeProbs"][: 1 + dists]
    assert {v.name: v.dtype.name for v in work.graph.outputs}[specs.CANDIDATE_PROBS] == "FLOAT"


@pytest.mark.parametrize("dists", [False, True])
def test_a_plan_builds(neutral, tmp_path, dists):
    load_rtx()
    model, dims = neutral
    spec = candidate_spec(decoder_spec("draft", dims), NUM, dists)
    options = CompileOptions("float16", 2, ROWS, 9, Config(variant="tensorrt_rtx", plugins="none"))
    backend, folder = registry.backend("tensorrt"), tmp_path / "plan"
    backend.compile(CompileJob(model, spec, folder, options=options))
    assert (folder / backend.graph_file).stat().st_size > 0
