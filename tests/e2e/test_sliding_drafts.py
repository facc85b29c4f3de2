# SPDX-License-Identifier: Apache-2.0
"""An EAGLE-3.1 drafter with a window, whose short cache slides: the drafts are those of a cache that keeps all rows."""

import pytest

from speccompile.backends.base import LoadJob
from speccompile.core import registry
from speccompile.core.jobs import DecoderOptions, GraphJob, MethodContext, SourceContext
from speccompile.core.sampling import SamplingParams
from speccompile.drafting.sliding_rows import rows_of_step
from speccompile.runtime.control import FixedLength
from speccompile.runtime.requests import Request
from speccompile.runtime.sequences import RequestHandle
from speccompile.runtime.service import make_scheduler, open_outputs
from speccompile.runtime.spec_engine import SpecEngine

WINDOW, MAX_SEQ, MAX_NODES = 4, 60, 10  # the target is that of test_eagle.py
NUM_DRAFTS = 4  # of a step: fewer than the graphs can take, so that rows slide often
SHORT, WHOLE = WINDOW - 1 + rows_of_step(NUM_DRAFTS + 1), MAX_SEQ + MAX_NODES + 1
TREES = {"chain": {"tree": "chain"}, "auto": {"tree": "auto"}, "fixed": {"tree": {"widths": [2, 1]}}}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """By backend and rows of the draft's cache, all engines."""
    pytest.importorskip("torch")
    from speccompile.core.registry import find_class
    from speccompile.export.decoder_source import DecoderSource
    from tests.speculators import eagle_lab as lab

    folder = tmp_path_factory.mktemp("sliding")
    job = GraphJob(
        "target",
        str(lab.write_target(folder / "target")),
        options=DecoderOptions(hidden=True, hidden_layers=lab.STREAMS),
    )
    source = DecoderSource(job, SourceContext("checkpoint", MAX_SEQ, MAX_NODES))
    context = SourceContext("checkpoint", MAX_SEQ, MAX_NODES, source.dims, job)
    lab.write_windowed_eagle3(folder / "eagle3", folder / "target", WINDOW)
    method, backends = registry.method("eagle3"), ("onnxruntime", "reference")
    made = {"target": lab.compiled(source, folder, *backends, slots=8, rows=WHOLE)}
    for job in method.graph_jobs(method.Config(str(folder / "eagle3"), tree={"widths": [8]})):
        source = find_class(job.source)(job, context)
        made[job.name] = lab.compiled(source, folder, *backends, slots=8, rows=SHORT)
        if job.name == "draft":
            assert source.spec().window == WINDOW
            spec, path = source.spec(), folder
    held = {(name, SHORT): {graph: engines[i] for graph, engines in made.items()} for i, name in enumerate(backends)}
    whole = registry.backend("onnxruntime").load(
        LoadJob(path / "onnxruntime/draft/graph.onnx", spec, max_slots=8, max_rows=WHOLE, tuning={"threads": 1})
    )
    return {**held, ("onnxruntime", WHOLE): {**held["onnxruntime", SHORT], "draft": whole}}


def load(parts, rows, backend="onnxruntime", **options):
    """Returns an engine whose proposer knows no costs: on a target as small as this one nothing would be drafted."""
    timed = parts[backend, rows]
    method, context = registry.method("eagle3"), MethodContext(8, MAX_SEQ, NUM_DRAFTS)
    drafts = {name: engine for name, engine in timed.items() if name != "target"}
    proposer = method.make_proposer(method.Config("", **options), drafts, context)
    return SpecEngine(timed["target"], drafts, proposer, None, context)


def prompts():
    from tests.speculators.eagle_lab import PROMPTS

    return [*PROMPTS, [17] * 9 + 2 * PROMPTS[0]]  # the last one is longer than the short cache


def params(*heats):
    return [
        SamplingParams(max_new_tokens=22 + i, temperature=heats[i % len(heats)], seed=i) for i in range(len(prompts()))
    ]


def steps(results):
    return [(r.tokens, r.stats["num_steps"], r.stats["num_draft_tokens"], r.stats["num_accepted"]) for r in results]


@pytest.mark.parametrize("tree", TREES)
def test_drafts_and_texts_are_those_of_a_cache_that_keeps_all_rows(parts, tree):
    short, whole = (load(parts, rows, **TREES[tree]) for rows in (SHORT, WHOLE))
    plain = whole.generate(prompts(), params(0.0), speculative=False, batch_size=1)
    for heats in ((0.0,), (1.0, 0.0, 0.7)):
        for batch_size in (1, 3, 8):
            fast = short.generate(prompts(), params(*heats), batch_size=batch_size)
            assert steps(fast) == steps(whole.generate(prompts(), params(*heats), batch_size=batch_size))
            assert sum(r.stats["num_accepted"] for r in fast) > 20
            if heats == (0.0,):
                assert [r.tokens for r in fast] == [r.tokens for r in plain]
    firsts = short.proposer.rows.rows.firsts
    assert max(firsts) > 10 and parts["onnxruntime", SHORT]["draft"].caches.num_bytes * 3 < (
        parts["onnxruntime", WHOLE]["draft"].caches.num_bytes
    )


def test_the_oracle_slides_too(parts):
    prompt, limit = prompts()[-1:], SamplingParams(max_new_tokens=5)
    engine = load(parts, SHORT, "reference", **TREES["fixed"])
    fast = engine.generate(prompt, limit)
    assert steps(fast) == steps(load(parts, WHOLE, **TREES["fixed"]).generate(prompt, limit))
    assert max(engine.proposer.rows.rows.firsts) > 10


def serve(engine, requests, at_once):
    """Returns texts and steps of requests, and the tokens of their prompts that were in a cache."""
    scheduler, done, results = make_scheduler(engine, FixedLength(None)), {}, {}
    for first in range(0, len(requests), at_once):
        for num, request in enumerate(requests[first : first + at_once], first):
            handle = RequestHandle(num, 0.0)
            open_outputs(handle, [request], engine, "auto")
            scheduler.add(handle)
        while scheduler.has_work:
            for handle, output in scheduler.step():
                done.setdefault((handle.number, output.output_index), []).extend(output.tokens)
                if output.stats is not None:
                    results[handle.number, output.output_index] = output.stats
    told = {key: (done[key], results[key]["num_steps"], results[key]["num_accepted"]) for key in results}
    return told, sum(stats["num_reused_tokens"] for stats in results.values())


@pytest.mark.parametrize("tree", ["chain", "fixed"])
def test_prefixes_and_moved_slots_give_the_same_drafts(parts, tree):
    """Rows that have slid out are read again by target and draft: fewer are reused, nothing else differs."""
    base = prompts()[-1]
    texts = [base, [*base, 3, 1, 4], [*base[:24], 9], [*base[:18], 2, 2], *prompts()[:4], [*base, 3, 1, 4, 1], base]
    requests = [
        Request(
            text, SamplingParams(max_new_tokens=8 + 5 * (i % 3), seed=i, temperature=i % 3 / 2), num_outputs=1 + i % 2
        )
        for i, text in enumerate(texts)
    ]
    for at_once in (1, 4):
        short, whole = (serve(load(parts, rows, **TREES[tree]), requests, at_once) for rows in (SHORT, WHOLE))
        assert short[0] == whole[0] and len(short[0]) == sum(request.num_outputs for request in requests)
        assert 0 < short[1] < whole[1]
