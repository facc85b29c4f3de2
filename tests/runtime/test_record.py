# SPDX-License-Identifier: Apache-2.0
"""A record of a service has its requests and texts, and decodes to the same texts again; changed texts are found."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from speccompile.cli.main import main
from speccompile.core.sampling_params import SamplingParams
from speccompile.errors import CheckpointError, RuntimeFault
from speccompile.runtime.record import RecordedService, read_record, replay
from speccompile.runtime.requests import Request, StepOutput
from speccompile.runtime.service import Service, ServiceOptions
from tests.golden.method_fakes import make_engine

WARM = SamplingParams(max_new_tokens=12, temperature=0.8, seed=3, stop=("q",), logit_bias={2: -1.0})
REQUESTS = [
    (Request("abc", SamplingParams(max_new_tokens=9)),),
    (Request([1, 2, 3], WARM, num_outputs=2), Request("dab", SamplingParams(max_new_tokens=5, temperature=1.0))),
    (Request("ca", SamplingParams(max_new_tokens=3), speculation="off"),),
]


def decode(service: Service, *requests: Request) -> None:
    """Submits requests as one and waits for their ends."""
    ended = threading.Semaphore(0)

    def on_output(step: StepOutput) -> None:
        if step.finish_reason is not None:
            ended.release()

    service.submit(requests[0], on_output, *requests[1:])
    for _ in range(sum(request.num_outputs for request in requests)):
        assert ended.acquire(timeout=30)


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """Returns the record of a service that drafted with a model."""
    path = tmp_path / "record.jsonl"
    with RecordedService(make_engine("draft_model"), ServiceOptions(), path) as service:
        for requests in REQUESTS:
            decode(service, *requests)
    return path


def test_a_record_has_what_was_asked_and_what_came(record):
    found = read_record(record)
    assert [one.requests for one in found.recorded] == REQUESTS
    assert found.num_left_out == 0 and found.is_of(None)
    assert [len(one.outputs) for one in found.recorded] == [1, 3, 1]
    assert [len(tokens) for tokens, _ in found.recorded[0].outputs] == [9]
    assert {reason for one in found.recorded for _, reason in one.outputs} <= {"length", "stop"}


@pytest.mark.parametrize("method", ["none", "draft_model", "eagle3", "suffix-tree"])
def test_every_method_gives_the_recorded_texts(record, method):
    ended: list[int] = []
    with Service(make_engine(method)) as service:
        assert replay(service, read_record(record).recorded, ended.append) == []
    assert ended == [1, 2, 3, 4, 5]


def test_a_changed_text_is_found_at_its_first_other_token(record):
    header, first, *rest = record.read_text().splitlines()
    line: dict[str, Any] = json.loads(first)
    tokens = line["outputs"][0]["tokens"]
    line["outputs"][0]["tokens"] = [*tokens[:4], (tokens[4] + 1) % 24, *tokens[5:]]
    record.write_text("\n".join([header, json.dumps(line), *rest]))
    with Service(make_engine("none")) as service:
        [difference] = replay(service, read_record(record).recorded)
    assert (difference.line, difference.output, difference.at) == (0, 0, 4)
    assert difference.got == tokens[4:] and difference.wanted[1:] == tokens[5:]


def test_an_output_that_was_cut_is_decoded_and_compared_as_far_as_it_came(record, monkeypatch):
    header, first, *_ = record.read_text().splitlines()
    line: dict[str, Any] = json.loads(first)
    line["outputs"][0] = {"tokens": line["outputs"][0]["tokens"][:2], "finish_reason": "cancelled"}
    line["requests"][0]["sampling"] |= {"max_new_tokens": 50, "ignore_eos": True}
    record.write_text(f"{header}\n{json.dumps(line)}\n")
    ended: list[dict[str, Any]] = []
    engine = make_engine("none")
    target = engine.verifier.engine
    run = target.run
    monkeypatch.setattr(target, "run", lambda *given, **named: time.sleep(0.01) or run(*given, **named))
    with Service(engine) as service:
        assert replay(service, read_record(record).recorded, on_stats=ended.append) == []
    assert ended[0]["num_tokens"] < 50  # it ended when it had come as far


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "an empty file"),
        ("{}", ":1: got KeyError"),
        ('{"kind": "other", "speccompile": "1", "bundle": null}', ":1: got ValueError: kind 'other'"),
        ('{"kind": "speccompile record", "speccompile": "1", "bundle": null}\n{"requests": []}', ":2: got KeyError"),
        (
            '{"kind": "speccompile record", "speccompile": "1", "bundle": null}\n{"outputs": [], "requests": [{'
            '"num_images": 0, "prompt": "a", "sampling": {"warmth": 1}, "num_outputs": 1, "speculation": "auto"}]}',
            r":2: got ValueError: unknown parameters \['warmth'\]",
        ),
    ],
)
def test_what_is_no_record_is_refused_with_its_line(tmp_path, text, words):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(RuntimeFault, match=words):
        read_record(path)


def test_a_record_replaces_no_file(record):
    with pytest.raises(RuntimeFault, match=r"--record: got .*File exists; expected a new file"):
        RecordedService(make_engine("none"), ServiceOptions(), record)


def test_the_command_says_how_many_texts_are_equal(record, monkeypatch, capsys):
    monkeypatch.setattr("speccompile.runtime.engine.load", lambda *args, **options: make_engine("eagle3"))
    assert main(["replay", str(record), "bundle"]) == 0
    assert capsys.readouterr().out == "5 of 5 texts are equal\n"
    text = record.read_text()
    tokens = json.loads(text.splitlines()[1])["outputs"][0]["tokens"]
    record.write_text(text.replace(json.dumps(tokens), json.dumps([0, *tokens[1:]]), 1).replace("null", '"other"', 1))
    assert main(["replay", str(record), "bundle"]) == 8
    out, err = capsys.readouterr()
    assert out.startswith("request 0, output 0, token 0: recorded 'a") and out.endswith("\n4 of 5 texts are equal\n")
    assert "warning: recorded by another bundle or version" in err
    assert main(["replay", str(record), "bundle", "--limit", "1", "--json"]) == 8
    result = json.loads(capsys.readouterr().out)
    assert (result["num_texts"], len(result["differences"])) == (1, 1)
    [text] = result["results"]
    assert text["stats"]["num_steps"] > 0 and {"acceptance_histogram", "acceptance_by_position"} <= set(text["stats"])


def test_serve_records_what_it_is_asked(tmp_path, monkeypatch):
    pytest.importorskip("fastapi")
    from speccompile.serving.openai import process

    monkeypatch.setattr("speccompile.runtime.engine.load", lambda *args, **options: make_engine("none"))
    monkeypatch.setattr(process, "bind", lambda listener: None)
    monkeypatch.setattr(process, "run", lambda app, service, listener, bound: decode(service, *REQUESTS[0]))
    path = tmp_path / "served.jsonl"
    assert main(["serve", "bundle", "--record", str(path)]) == 0
    assert [one.requests for one in read_record(path).recorded] == REQUESTS[:1]


def test_serve_checks_the_record_before_it_loads(record, tmp_path, monkeypatch, capsys):
    pytest.importorskip("fastapi")

    def load(*args, **options):
        raise CheckpointError("bundle", "no model", "one", "Build it.")

    monkeypatch.setattr("speccompile.runtime.engine.load", load)
    path = tmp_path / "new.jsonl"
    for file, words in ((record, "File exists"), (tmp_path / "none/x", "No such file"), (path, "no model")):
        assert main(["serve", "bundle", "--port", "0", "--record", str(file)]) != 0
        assert words in capsys.readouterr().err
    assert not path.exists()
