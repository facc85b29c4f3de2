# SPDX-License-Identifier: Apache-2.0
import asyncio
import threading
import time

import pytest

from speccompile.core.sampling import SamplingParams
from speccompile.errors import RuntimeFault
from speccompile.runtime.requests import Busy, Request
from speccompile.runtime.service import Service, ServiceOptions
from tests.lab.decoding import fail_once
from tests.lab.engines import Letters
from tests.runtime.test_spec_engine import TARGET, make_engine, text


def greedy(num=12, **rest):
    return SamplingParams(max_new_tokens=num, **rest)


@pytest.fixture
def serve():
    """Makes services that are closed after the test."""
    services = []

    def make(options=None, **sizes):
        services.append(Service(make_engine(**sizes), options))
        services[-1].start()
        return services[-1]

    yield make
    for service in services:
        service.close()


class Sink:
    """Collects step outputs; `wait` returns once all outputs have ended."""

    def __init__(self, num_outputs=1):
        self.step_outputs, self._left, self._done = [], num_outputs, threading.Event()
        self.started = threading.Event()

    def __call__(self, step_output):
        self.step_outputs.append(step_output)
        self.started.set()
        self._left -= step_output.finish_reason is not None
        if self._left == 0:
            self._done.set()

    def wait(self):
        assert self._done.wait(30)
        return self.step_outputs


def test_many_requests_at_once_get_their_own_texts(serve):
    service = serve()
    prompts = ["abc", "dab", "xx", "k" * 30, "c", "ab"] * 4
    sinks = [Sink() for _ in prompts]
    for i, (prompt, sink) in enumerate(zip(prompts, sinks, strict=True)):
        service.submit(Request(prompt, greedy(5 + i)), sink)
    for i, (prompt, sink) in enumerate(zip(prompts, sinks, strict=True)):
        step_outputs = sink.wait()
        assert "".join(p.text for p in step_outputs) == text(prompt, 5 + i)
        assert [t for p in step_outputs for t in p.tokens] == TARGET.greedy(Letters().encode(prompt).ids, 5 + i)
        assert [p.finish_reason for p in step_outputs] == [None] * (len(step_outputs) - 1) + ["length"]
    stats = service.stats()
    assert stats["num_finished"] == {"length": len(prompts)} and stats["num_requests"] == len(prompts)
    assert stats["num_tokens"] == sum(5 + i for i in range(len(prompts)))
    assert (stats["num_queued"], stats["num_prefilling"], stats["num_active"]) == (0, 0, 0)


def test_streams_and_completions_in_an_event_loop(serve):
    service = serve()

    async def all_of_it():
        one = service.generate(Request("abc", greedy(20)))
        three = service.generate(Request("dab", greedy(9, temperature=1.0, seed=5), num_outputs=3))
        step_outputs = [step_output async for _, step_output in service.stream(Request("xx", greedy(7)))]
        return await one, await three, step_outputs

    [one], three, step_outputs = asyncio.run(all_of_it())
    assert (one.text, one.finish_reason, one.error) == (text("abc", 20), "length", None)
    assert len(three) == 3 and len({c.text for c in three}) > 1
    alone = make_engine().generate("dab", greedy(9, temperature=1.0, seed=6), speculative=False)[0]
    assert three[1].tokens == alone.tokens
    assert "".join(p.text for p in step_outputs) == text("xx", 7)
    stats = step_outputs[-1].stats
    assert stats["num_tokens"] == 7 and stats["num_prompt_tokens"] == 2 and stats["num_reused_tokens"] == 0
    assert 0 <= stats["queue_ms"] <= stats["time_to_first_token_ms"]


@pytest.mark.parametrize("prompt", [b"\x01\x02", {3: 1}])
def test_bytes_and_mappings_are_no_token_ids(serve, prompt):
    with pytest.raises(RuntimeFault, match="expected a text, or token ids"):
        serve().submit(Request(prompt, greedy(4)), Sink())


def test_cancel_is_idempotent_and_gives_each_output_one_last_step_output(serve):
    service = serve(max_seq=4096)
    sink, waiting = Sink(3), Sink()
    handle = service.submit(Request("abc", greedy(4000), num_outputs=3), sink)
    second = service.submit(Request("abc", greedy(4000)), waiting)
    assert sink.started.wait(30)
    service.cancel(second)
    service.cancel(handle)
    service.cancel(handle)
    ends = [p for p in sink.wait() if p.finish_reason]
    assert sorted(p.output_index for p in ends) == [0, 1, 2]
    assert {p.finish_reason for p in ends} == {"cancelled"} and waiting.wait()[-1].finish_reason == "cancelled"
    service.cancel(handle)
    assert service.stats()["num_finished"] == {"cancelled": 4}


def test_a_full_queue_is_busy(serve):
    service = serve(ServiceOptions(max_queue=2), slots=1, max_seq=4096)
    first = Sink()
    handle = service.submit(Request("abc", greedy(4000)), first)
    assert first.started.wait(30)
    sinks = [Sink(), Sink()]
    for sink in sinks:
        service.submit(Request("dab", greedy(3)), sink)
    with pytest.raises(Busy, match=r"queue: got 2 waiting requests; expected less than 2\. Send the request again"):
        service.submit(Request("dab", greedy(3)), Sink())
    service.cancel(handle)
    assert all(sink.wait()[-1].finish_reason == "length" for sink in sinks)
    assert service.stats()["num_busy"] == 1


def test_a_timeout_ends_a_request_and_keeps_its_text(serve):
    service = serve(ServiceOptions(timeout_s=0.05), slots=1, max_seq=20000)
    sink, late = Sink(), Sink()
    service.submit(Request("abc", greedy(19000)), sink)
    service.submit(Request("abc", greedy(4), timeout_s=0.01), late)
    assert sink.wait()[-1].finish_reason == late.wait()[-1].finish_reason == "timeout"
    got = [t for p in sink.step_outputs for t in p.tokens]
    assert got == TARGET.greedy([0, 1, 2], len(got)) and sink.step_outputs[-1].stats["num_tokens"] == len(got)


def test_close_drains_or_cancels_and_refuses(serve):
    service = serve()
    sink = Sink()
    service.submit(Request("abc", greedy(50)), sink)
    service.close(drain_s=30)
    assert sink.wait()[-1].finish_reason == "length"
    with pytest.raises(Busy, match="a request to a service that does not run"):
        service.submit(Request("abc"), Sink())
    service.close()
    assert service.stats()["is_open"] is False

    service, sink = serve(slots=1, max_seq=4096), Sink()
    waiting = Sink()
    service.submit(Request("abc", greedy(4000)), sink)
    service.submit(Request("abc", greedy(4000)), waiting)
    assert sink.started.wait(30)
    service.close()
    assert sink.wait()[-1].finish_reason == waiting.wait()[-1].finish_reason == "cancelled"


@pytest.mark.parametrize("is_end_first", [False, True])
def test_the_earliest_end_counts_where_two_come_during_one_step(serve, is_end_first):
    service, sink, done = serve(slots=1, max_seq=4096), Sink(), threading.Event()

    def hold(step_output):
        sink(step_output)
        assert done.wait(30)

    service.submit(Request("abc", greedy(4000)), hold)
    assert sink.started.wait(30)  # the scheduler's thread is held from here on
    if is_end_first:
        service.end_drain()
    closing = threading.Thread(target=service.close, args=(60,))
    closing.start()
    while service._commands.qsize() < 1 + is_end_first:
        time.sleep(0.001)
    if not is_end_first:
        service.end_drain()
    done.set()
    closing.join(30)
    assert sink.wait()[-1].finish_reason == "cancelled"


def test_a_wrong_request_is_refused_at_once(serve):
    service = serve()
    with pytest.raises(RuntimeFault, match="prompt 0: got no tokens"):
        service.submit(Request(""), Sink())
    with pytest.raises(RuntimeFault, match="expected at most 64"):
        service.submit(Request("a" * 65), Sink())
    with pytest.raises(RuntimeFault, match=r"ServiceOptions.max_queue: got 0; expected at least 1"):
        ServiceOptions(max_queue=0)
    with pytest.raises(RuntimeFault, match="a second start"):
        service.start()
    assert service.stats()["num_requests"] == 0


def test_a_fault_of_the_engine_ends_the_batch_and_the_service_goes_on(serve, monkeypatch):
    service = serve()
    target = service.engine.verifier.engine
    fail_once(monkeypatch, target, 12)
    sinks = [Sink() for _ in range(8)]
    for sink in sinks:
        service.submit(Request("abc", greedy(20)), sink)
    reasons = [sink.wait()[-1].finish_reason for sink in sinks]
    assert 0 < reasons.count("error") <= 3 and set(reasons) == {"error", "length"}
    for sink, reason in zip(sinks, reasons, strict=True):
        if reason == "length":
            assert "".join(p.text for p in sink.step_outputs) == text("abc", 20)
        else:
            assert "a fault" in sink.step_outputs[-1].error
    assert service.stats()["num_engine_faults"] == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_the_service_ends_all_requests_and_is_reported(serve, monkeypatch):
    service, told, other = serve(), threading.Event(), Sink()
    service.watch(told.set)
    service.submit(Request("abc", greedy(60)), other)

    def wrong():
        raise TypeError("a scheduler that fails")

    monkeypatch.setattr(service._scheduler, "read", wrong)
    assert other.wait()[-1].finish_reason in ("error", "length")
    assert told.wait(30)
    service.close()
    assert service.fault == service.stats()["fault"] == "a bug in the service: TypeError: a scheduler that fails"
    with pytest.raises(Busy, match="bug in the service"):
        service.submit(Request("abc"), Sink())
    late = threading.Event()
    service.watch(late.set)
    assert late.is_set()


def test_a_sink_that_fails_ends_its_own_request(serve):
    service, other, taken = serve(), Sink(), []

    def wrong(step_output):
        taken.append(step_output)
        raise TypeError("a sink that fails")

    service.submit(Request("abc", greedy(60)), other)
    service.submit(Request("abc", greedy(60)), wrong)
    assert other.wait()[-1].finish_reason == "length"
    service.close()
    assert taken and service.fault is None


def test_a_prompt_that_cannot_join_ends_alone(serve, monkeypatch):
    """The fault comes after the sequence got its slot."""
    service, sinks = serve(), [Sink() for _ in range(3)]
    batch = service._scheduler.batch
    changed = batch.changed

    def wrong():
        if any(sequence.sampling.seed == 99 for sequence in batch.sequences):
            raise OverflowError("too large")
        changed()

    monkeypatch.setattr(batch, "changed", wrong)
    for i, sink in enumerate(sinks):
        service.submit(Request("abc", greedy(20, seed=99 if i == 1 else 0)), sink)
    step_outputs = [sink.wait() for sink in sinks]
    assert step_outputs[1][-1].finish_reason == "error" and "OverflowError: too large" in step_outputs[1][-1].error
    for i in (0, 2):
        assert "".join(p.text for p in step_outputs[i]) == text("abc", 20)


def test_stop_strings_and_ends_are_not_shown(serve):
    whole = text("abc", 40)
    eos = TARGET.greedy([0, 1, 2], 40)[25]
    service, stop = serve(eos=[eos]), whole[11:13]
    stopped, ended = Sink(), Sink()
    service.submit(Request("abc", greedy(40, stop=(stop,))), stopped)
    service.submit(Request("abc", greedy(40)), ended)
    step_outputs = stopped.wait()
    assert (
        "".join(p.text for p in step_outputs) == whole[: whole.index(stop)] and step_outputs[-1].finish_reason == "stop"
    )
    step_outputs, wanted = ended.wait(), TARGET.greedy([0, 1, 2], 40)
    assert [t for p in step_outputs for t in p.tokens] == wanted[: wanted.index(eos) + 1]
    assert step_outputs[-1].finish_reason == "stop"


def test_stats_can_be_asked_for_where_step_outputs_are_taken(serve):
    service, seen, done = serve(), [], threading.Event()

    def take(step_output):
        seen.append(service.stats()["num_tokens"])
        if step_output.finish_reason:
            done.set()

    service.submit(Request("abc", greedy(9)), take)
    assert done.wait(30) and seen == sorted(seen) and seen[-1] == 9
