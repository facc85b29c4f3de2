# SPDX-License-Identifier: Apache-2.0
"""A backend with the required methods only, and the checks of all engines."""

import numpy as np
import pytest

from speccompile.backends.base import Backend, EngineBase, LoadJob
from speccompile.core import registry
from speccompile.core.jobs import CompileOptions, WeightCounts
from speccompile.core.specs import CONFIDENCES, LENGTHS, TOKENS, GraphSpec, TensorSpec
from speccompile.errors import RuntimeFault

INPUTS = (TensorSpec(TOKENS, ("batch", "nodes"), "int64"), TensorSpec(LENGTHS, ("batch",), "int64"))
SPEC = GraphSpec("target", INPUTS, (), (), 8)


class Smallest(Backend):
    name = "smallest"

    def compile(self, job):
        return {}

    def compile_rollback(self, dims, dest, options=None):
        return SPEC

    def load(self, job):
        raise NotImplementedError


def test_a_backend_that_compiles_and_loads_is_whole(tmp_path):
    backend = Smallest()
    assert backend.check(SPEC, CompileOptions(), "none") is None
    assert backend.depends_on(CompileOptions()) == {}
    assert backend.why_unchecked() is None
    assert backend.tune(LoadJob(tmp_path, SPEC, threads=2, others_bytes=5)) == {}
    assert backend.predict(WeightCounts(10, 8, 2), "none", "float32").weights_bytes == 40
    assert not backend.keeps_logits and not backend.runs_code_on_load


def test_a_record_stays_as_it_is_by_default_but_is_not_the_same_object(tmp_path):
    record = {"threads": 2}
    adapted = Smallest().adapt_tuning(LoadJob(tmp_path, SPEC, tuning=record, threads=1, others_bytes=7))
    assert adapted == record and adapted is not record


@pytest.mark.parametrize("method", ["compile", "compile_rollback", "load"])
def test_a_backend_that_lacks_a_method_cannot_be_made(method):
    lacking = type("Lacking", (Smallest,), {method: getattr(Backend, method)})
    with pytest.raises(TypeError, match=method):
        lacking()


@pytest.mark.parametrize("name", sorted(registry.BACKENDS))
def test_every_backend_is_one(name):
    for device in ("cpu", "cuda"):
        backend = registry.backend(name, device)
        assert isinstance(backend, Backend) and backend.name == name


class Still(EngineBase[str]):
    """An engine that records what it compacts; a step gives a confidence that is not finite."""

    def run_graph(self, feeds, first_slot):
        return {CONFIDENCES: np.array([[0.5], [np.nan]])}

    def clear_slot(self, slot):
        self.cleared = slot

    def compact_with(self, rollback, lengths, path):
        self.compacted = rollback, lengths, path


DRAFT = GraphSpec("draft", INPUTS, (), ("past_key_0",), 8, rows_written_ahead=2)


def feeds(batch, nodes, length=0):
    return {TOKENS: np.zeros((batch, nodes), np.int64), LENGTHS: np.full(batch, length, np.int64)}


def test_a_step_may_use_the_last_slot_and_the_last_row():
    sizes, rows = Still(DRAFT, 4, 16).check_step(feeds(3, 5, 9), first_slot=1)
    assert (sizes["batch"], sizes["nodes"], rows) == (3, 5, 16)
    assert Still(SPEC, 4, 0).check_step({TOKENS: np.zeros((4, 5), np.int64)}, 0)[1] == 0


@pytest.mark.parametrize(
    ("step", "first_slot", "words"),
    [
        (feeds(3, 1), 2, "engine draft: got slots 2 to 4; expected slots below 4. Build with a larger engine.max_b"),
        (feeds(1, 6, 9), 0, "engine draft: got 17 cache rows; expected at most 16. Shorten the prompt or max_new_tok"),
    ],
)
def test_a_step_beyond_the_caches_is_refused(step, first_slot, words):
    with pytest.raises(RuntimeFault) as fault:
        Still(DRAFT, 4, 16).check_step(step, first_slot)
    assert str(fault.value).startswith(words)


def test_an_engine_without_a_rollback_refuses_trees():
    engine, lengths, path = Still(DRAFT, 4, 16), np.zeros(1, np.int64), np.zeros((1, 2), np.int64)
    with pytest.raises(RuntimeFault, match=r"engine draft: got a tree to roll back; .*Build the bundle again"):
        engine.compact(lengths, path)
    engine.rollback = "rollback"
    engine.compact(lengths, path)
    assert engine.compacted == ("rollback", lengths, path)


def test_an_engine_counts_its_seconds_and_gives_no_confidence_that_is_not_finite():
    outputs = (TensorSpec(CONFIDENCES, ("batch", "nodes"), "float32"),)
    engine = Still(GraphSpec("draft", INPUTS, outputs, ("past_key_0",), 8), 4, 16)
    found, once_s = engine.run(feeds(2, 1), first_slot=2), engine.seconds
    assert found[CONFIDENCES].tolist() == [[0.5], [0.0]] and engine.cleared == 3
    engine.rollback = "rollback"
    engine.compact(np.zeros(1, np.int64), np.zeros((1, 2), np.int64))
    assert 0 < once_s < engine.seconds


def test_an_engine_whose_caches_keep_their_layout_has_no_view():
    engine = Still(DRAFT, 4, 16)
    engine.reset()
    engine.shrink(3)
    assert engine.view_rows == 0 and not engine.compacts_in_step
