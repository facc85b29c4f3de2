# SPDX-License-Identifier: Apache-2.0
"""The plans of every method's graphs build without a GPU: one row a method (tests/method_rows.py)."""

import importlib.util
from pathlib import Path

import pytest

if importlib.util.find_spec("tensorrt_rtx") is None:
    pytest.skip("TensorRT-RTX is not installed: NO PLAN IS BUILT", allow_module_level=True)

import onnx_ir as ir

from speccompile.backends.base import CompileJob
from speccompile.backends.tensorrt.backend import LOWERED_FILE
from speccompile.backends.tensorrt.config import Config
from speccompile.core import registry
from speccompile.core.jobs import CompileOptions
from tests import store
from tests.method_rows import MAX_NODES, MAX_ROWS, ROWS, config_of, forms, method_of, quantization_of, sources

pytestmark = pytest.mark.plan

OPTIONS = Config(variant="tensorrt_rtx", plugins="none", keep_onnx=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tests.speculators.eagle_lab import write_target

    folder_of_plans = tmp_path_factory.mktemp("plans")
    write_target(folder_of_plans / "target")
    return folder_of_plans


@pytest.fixture(scope="module")
def graphs():
    """Exported graphs by what they are made of."""
    return {}


def cases():
    """Returns the rows with graphs of their own, without forms that have the graphs of the chain."""

    def jobs(method, form):
        return method_of(method).graph_jobs(config_of(method, form, Path("model")))

    with_graphs = [name for name, row in ROWS.items() if "drafters" not in row.chain and jobs(name, "chain")]
    return [
        (name, form)
        for name, form in forms()
        if name in with_graphs and (form == "chain" or jobs(name, form) != jobs(name, "chain"))
    ]


@pytest.mark.parametrize(("method", "form"), cases())
def test_plans_of_all_graphs_build(folder, graphs, tmp_path, method, form):
    from transformers import LlamaForCausalLM

    model = folder / method
    write = ROWS[method].write
    if write is not None and not model.exists():
        store.write_checkpoint(write, model, folder / "target")
        if method in ("draft_model", "pard"):  # the target's seven layers, of which a plan has the same parts
            LlamaForCausalLM.from_pretrained(model, num_hidden_layers=2).save_pretrained(model)
    backend = registry.backend("tensorrt")
    _, *drafts = sources(method, form, folder / "target", model)
    assert drafts
    for source in drafts:
        graph = (source.job.model, source.job.source, str(getattr(source, "outputs", source.job.options)))
        if graph not in graphs:
            graphs[graph] = store.export(source)[0]
        rows = MAX_ROWS + source.spec().rows_written_ahead if source.max_rows else 0
        options = CompileOptions("float16", 2, rows, MAX_NODES + 1, OPTIONS)
        folder_of_plans = tmp_path / source.job.name
        quantization = quantization_of(source, backend)
        backend.compile(CompileJob(graphs[graph], source.spec(), folder_of_plans, quantization, options=options))
        assert (folder_of_plans / backend.graph_file).stat().st_size > 10_000
        parsed = ir.load(folder_of_plans / LOWERED_FILE).graph
        has_int4 = any(value.dtype == ir.DataType.INT4 for value in parsed.initializers.values())
        assert has_int4 == (quantization == "int4") and (has_int4 or method != "self_draft")
        inputs = {value.name for value in parsed.inputs}
        assert all(held.owner == "target" and held.name in inputs for held in source.spec().borrowed)
        assert len(source.spec().borrowed) > 0 or method not in ("self_draft", "early_exit")
