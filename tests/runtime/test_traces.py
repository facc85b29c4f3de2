# SPDX-License-Identifier: Apache-2.0
"""How many functions and files a step and a request pass through: these numbers may only fall.

A change that lowers one writes it into the table. A file costs its reader more than a call, so files count first.
"""

import sys

import pytest
from typer.testing import CliRunner

from speccompile.cli.main import app
from speccompile.core.sampling_params import SamplingParams
from tests.golden.method_fakes import make_engine
from tests.lab.engines import Letters
from tests.pipeline import fakes
from tests.runtime.call_trace import traced

# (files, most calls of one step) of a stream at batch 1, engines and fakes not counted.
STEPS = {"none": (8, 35), "draft_model": (12, 116), "eagle3": (13, 186)}
# (files, calls) of `generate` for a prompt and eight tokens; files of a build from the command line, its export a fake.
GENERATE = {"none": (13, 343), "draft_model": (18, 433), "eagle3": (19, 549)}
BUILD = 40
COMPLETION = (25, 935)  # calls vary by a few with the turns of two threads


@pytest.mark.parametrize("method", STEPS)
def test_a_step_passes_through_no_more_files_and_calls(method):
    engine = make_engine(method)
    steps = engine.stream("abc", SamplingParams(max_new_tokens=48, ignore_eos=True))
    files: set[str] = set()
    most, table = 0, ""
    for _ in range(3):  # the first token comes with the prompt, and the first steps lay out memory
        next(steps)
    for _ in range(8):
        with traced() as trace:
            next(steps)
        files |= set(trace.calls)
        if trace.num_calls > most:
            most, table = trace.num_calls, trace.table()
    num_files, num_calls = STEPS[method]
    assert len(files) <= num_files and most <= num_calls, f"{len(files)}, {most}\n{sorted(files)}\n{table}"


@pytest.mark.parametrize("method", GENERATE)
def test_a_prompt_passes_through_no_more_files_and_calls(method):
    for _ in range(2):  # the first run imports what the second one calls
        engine, params = make_engine(method), SamplingParams(max_new_tokens=8)
        with traced() as trace:
            engine.generate(["abc"], params)
    num_files, num_calls = GENERATE[method]
    assert trace.num_files <= num_files and trace.num_calls <= num_calls, (
        f"{trace.num_files}, {trace.num_calls}\n{trace.table()}"
    )


def test_a_build_passes_through_no_more_files(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path / "cache"))
    fakes.install(monkeypatch.setattr, lambda name, module: monkeypatch.setitem(sys.modules, name, module))
    command = ["build", str(fakes.write_recipe(tmp_path / "in")), "-o", str(tmp_path / "out"), "--no-cache"]
    for _ in range(2):
        with traced() as trace:
            done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
    assert trace.num_files <= BUILD, f"{trace.num_files}\n{trace.table()}"


def test_a_streamed_completion_passes_through_no_more_files():
    pytest.importorskip("fastapi")
    from speccompile.runtime.service import Service
    from speccompile.serving.openai.app import make_app
    from speccompile.serving.openai.server import OpenAIServer, ServerOptions
    from tests.serving.asgi_lab import post

    body = {"model": "mock", "prompt": "abc", "max_tokens": 8, "stream": True}
    engine = make_engine("draft_model")
    service = Service(engine)
    server = make_app(OpenAIServer(service, ServerOptions(model_name="mock")))
    with traced() as trace, service:
        reply = post(server, "/v1/completions", body)
    text = "".join(event["choices"][0]["text"] for event in reply.events() if event != "[DONE]" and event["choices"])
    assert text == Letters().decode(make_engine("none").generate(["abc"], SamplingParams(max_new_tokens=8))[0].tokens)
    num_files, num_calls = COMPLETION
    assert trace.num_files <= num_files and trace.num_calls <= num_calls, (
        f"{trace.num_files}, {trace.num_calls}\n{trace.table()}"
    )
