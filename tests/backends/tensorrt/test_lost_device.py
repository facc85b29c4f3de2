# SPDX-License-Identifier: Apache-2.0
"""A device that fails for good: every request ends, the service ends and says why, whatever call the fault shows in."""

import pytest

from speccompile.core.dims import ModelDims
from speccompile.core.jobs import MethodContext
from speccompile.core.protocols import DeviceLost
from speccompile.core.sampling import SamplingParams
from speccompile.graph_kinds.decoder import candidate_spec, decoder_spec, verified_spec
from speccompile.runtime.requests import Busy, Request
from speccompile.runtime.service import Service
from speccompile.runtime.spec_engine import SpecEngine
from speccompile.speculators.draft_model.config import DraftModelConfig, DraftModelMethod
from tests.backends.tensorrt import fake_trt
from tests.backends.tensorrt.fake_cuda import FailingCuda
from tests.backends.tensorrt.trt_lab import Lab

ROWS, SPARE, SLOTS = 160, 8, 3
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1] * 40, [8, 2, 8], [5], [9, 9, 3, 1] * 8]
GREEDY = SamplingParams(max_new_tokens=18)
DIMS = ModelDims("llama", 97, 64, 2, 4, 2, 16, ROWS)
SPECS = {
    "target": verified_spec(decoder_spec("target", DIMS), keep_logits=True),
    "draft": candidate_spec(decoder_spec("draft", DIMS), 1, dists=True),
}


# Finalisers do not look at the status of these, and the last is asked after an error alone.
UNSEEN = {"cudaFree", "cudaFreeHost", "cudaGraphDestroy", "cudaGraphExecDestroy", "cudaGetLastError"}
FUNCTIONS = {
    *("cudaSetDevice", "cudaMalloc", "cudaMallocHost", "cudaMemcpyAsync", "cudaStreamSynchronize"),
    *("cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphInstantiate", "cudaGraphLaunch"),
}


class Sink(list):
    """Step outputs of a request."""

    def __call__(self, step_output):
        self.append(step_output)


def load(lab, role):
    return lab.load((None, SPECS[role], None), rows=ROWS + SPARE)


@pytest.fixture
def serve(monkeypatch, tmp_path):
    """(fails_at, lasts, execute) -> service, sinks and the device, once all requests have ended."""

    def run(fails_at=None, lasts=True, execute=None):
        lab = Lab(monkeypatch, tmp_path, cuda=FailingCuda(lasts=lasts))
        engines = {role: load(lab, role) for role in SPECS}
        context = MethodContext(SLOTS, ROWS, SPARE - 1)
        drafts, config = {"draft": engines["draft"]}, DraftModelConfig("d", num_draft_tokens=3)
        proposer = DraftModelMethod().make_proposer(config, drafts, context)
        service = Service(SpecEngine(engines["target"], drafts, proposer, None, context, chunk=50))
        service._is_open = True  # all requests are there when the thread starts, so that calls come in the same order
        sinks = [Sink() for _ in PROMPTS]
        for prompt, sink in zip(PROMPTS, sinks, strict=True):
            service.submit(Request(prompt, GREEDY, speculation="on"), sink)
        lab.cuda.calls.clear()
        lab.cuda.fails_at = fails_at
        if execute is not None:
            execute(lab)
        service.start()
        if fails_at is None and execute is None:
            service.close(30)
        service._thread.join(30)
        assert not service._thread.is_alive()
        return service, sinks, lab.cuda

    return run


@pytest.fixture
def points(serve):
    """(function, calls before) of the first call, one in the middle and the last one of every function."""
    _, sinks, cuda = serve()
    assert {sink[-1].finish_reason for sink in sinks} == {"length"} and cuda.calls.keys() >= FUNCTIONS
    calls = {name: num for name, num in cuda.calls.items() if name not in UNSEEN}
    return sorted({(name, at) for name, num in calls.items() for at in (0, num // 2, num - 1)})


def check_lost(service, sinks, name, cause=""):
    for sink in sinks:
        assert [output.finish_reason is not None for output in sink] == [False] * (len(sink) - 1) + [True]
    errors = [sink[-1].error for sink in sinks if sink[-1].finish_reason != "length"]
    assert errors and all(name in error or (cause and cause in error) for error in errors)
    stats = service.stats()
    assert name in stats["fault"] and not stats["is_open"]
    with pytest.raises(Busy, match=name):
        service.submit(Request(PROMPTS[0]), Sink())
    service.close()


@pytest.mark.parametrize("lasts", [True, False])
def test_a_lost_device_ends_every_request_and_the_service(serve, points, lasts):
    for at in points:
        service, sinks, cuda = serve(at, lasts)
        assert cuda.has_failed
        check_lost(service, sinks, "cudaErrorIllegalAddress")


@pytest.mark.parametrize("num_before", [0, 3, 12])
def test_a_library_that_does_not_say_that_the_device_is_lost(serve, monkeypatch, num_before):
    def execute(lab):
        real, calls = fake_trt.FakeContext.execute_async_v3, []

        def failing(context, stream):
            calls.append(1)
            lab.cuda.has_failed = len(calls) > num_before
            return len(calls) <= num_before and real(context, stream)

        monkeypatch.setattr(fake_trt.FakeContext, "execute_async_v3", failing)

    check_lost(*serve(execute=execute)[:2], "cudaErrorIllegalAddress")


def test_a_reset_that_fails_ends_the_service_after_all_ends(serve, monkeypatch):
    """Whatever it fails with: no slot could be trusted."""

    def execute(lab):
        monkeypatch.setattr(SpecEngine, "reset", lambda engine, **more: int("no number"))
        real, calls = fake_trt.FakeContext.execute_async_v3, []
        monkeypatch.setattr(
            fake_trt.FakeContext,
            "execute_async_v3",
            lambda c, stream: calls.append(1) or (len(calls) < 30 and real(c, stream)),
        )

    check_lost(*serve(execute=execute)[:2], "invalid literal", "refused to enqueue")


def test_a_device_that_is_lost_while_an_engine_loads_is_named(monkeypatch, tmp_path):
    cuda = FailingCuda()
    load(Lab(monkeypatch, tmp_path, cuda=cuda), "target")
    for name in set(cuda.calls) - UNSEEN - {"cudaGetDeviceCount", "cudaStreamCreateWithFlags"}:
        lab = Lab(monkeypatch, tmp_path, cuda=FailingCuda())
        lab.cuda.fails_at = (name, lab.cuda.calls[name])
        with pytest.raises(DeviceLost, match="cudaErrorIllegalAddress"):
            load(lab, "target")
