# SPDX-License-Identifier: Apache-2.0
"""The process: how it starts, and how it ends under load."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from speccompile.cli import serve
from speccompile.cli.main import main
from speccompile.errors import RuntimeFault
from speccompile.runtime.requests import Request
from speccompile.serving.openai.process import Listener, bind, run, url_from_socket
from tests.serving.live_server import PROGRAM, Live, live_server
from tests.serving.mock_service import serving

pytestmark = pytest.mark.live

PATH = "/v1/completions"
BODY = {"prompt": "class Stack:\n", "max_tokens": 400, "stream": True, "ignore_eos": True}


def stream(server, **fields):
    """Returns the events of one stream; the connection may be refused."""
    status, text = server.ask("POST", PATH, {**BODY, **fields})
    assert status == 200
    parts = text.split("\n\n")
    assert parts[-1] == "" and parts[-2] == "data: [DONE]", "the stream was cut off"
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def signal_twice(server, number):
    """Sends a signal, and again once the server shuts down; the exit code."""
    server.process.send_signal(number)
    while not any("Shutting down" in line for line in server.lines):
        time.sleep(0.01)
    server.process.send_signal(number)
    return server.process.wait(60)


def run_under_load(chat_bundle, drain_s, stop=Live.stop, num=8, **fields):
    """Returns (ends of streams, exit code) of a server that is stopped once eight of them run and the others wait."""
    with live_server(chat_bundle, "--drain-s", drain_s) as server, ThreadPoolExecutor(num) as pool:
        streams = [pool.submit(stream, server, **fields) for _ in range(num)]
        while server.metric("active_outputs") + server.metric("queued_outputs") < num:
            assert not any(future.done() for future in streams), "a stream ended before the last one began"
            time.sleep(0.01)
        code = stop(server)
        ends = [future.result(60)[-1] for future in streams]
        with pytest.raises(ConnectionRefusedError):
            server.ask("GET", "/health")
    return ends, code


def test_sigterm_lets_running_requests_finish(chat_bundle):
    ends, code = run_under_load(chat_bundle, "60")
    assert code == 0
    assert [end["choices"][0]["finish_reason"] for end in ends] == ["length"] * 8


def test_sigterm_ends_requests_with_an_error_when_their_time_is_over(chat_bundle):
    ends, code = run_under_load(chat_bundle, "0")
    assert code == 0
    assert [end["error"]["code"] for end in ends] == ["shutting_down"] * 8


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_waits_for_no_request(chat_bundle, number):
    # 77,000 tokens: a server that is slow to hear of the second signal has not written them all.
    ends, code = run_under_load(chat_bundle, "60", lambda server: signal_twice(server, number), num=48, n=4)
    errors = [end["error"]["code"] for end in ends if "error" in end]
    assert code == 0 and errors == ["shutting_down"] * len(errors)
    assert len(errors) >= 24  # some may end between the two


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("is_early", [True, False], ids=["before it listens", "while it serves"])
def test_service_fault_ends_the_process(monkeypatch, is_early):
    def wrong():
        raise TypeError("a scheduler that fails")

    with serving() as (app, service, _):
        monkeypatch.setattr(service._scheduler, "read", wrong)
        step_outputs, done = [], threading.Event()

        def take(step_output):
            step_outputs.append(step_output)
            done.set()

        def ask():
            service.submit(Request([1, 2]), take)

        if is_early:
            ask()
            assert done.wait(20)
        else:
            threading.Timer(1.0, ask).start()
        listener = Listener(port=0, drain_s=0)
        with pytest.raises(RuntimeFault, match=r"a scheduler that fails.*Start it again") as fault:
            run(app, service, listener, bind(listener))
        assert fault.value.exit_code == 8 and step_outputs[-1].finish_reason == "error"


def test_a_killed_server_starts_again_on_its_port(chat_bundle):
    body = {"prompt": "def add(a, b):", "max_tokens": 8}
    with live_server(chat_bundle) as server:
        _, before = server.ask("POST", PATH, body)
        port = server.port
        os.kill(server.process.pid, signal.SIGKILL)
        assert server.process.wait(20) == -signal.SIGKILL
    with live_server(chat_bundle, "--port", str(port)) as server:
        _, after = server.ask("POST", PATH, body)
        assert after["choices"] == before["choices"]
        assert server.stop() == 0


def test_a_port_in_use_is_reported_before_the_model_is_loaded(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [PROGRAM, "serve", str(tmp_path / "none"), "--port", str(taken.getsockname()[1])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == RuntimeFault.exit_code
    assert "Address already in use" in done.stderr and "Choose another --host or --port." in done.stderr


def test_a_port_is_taken_before_the_model_is_loaded():
    in_use = pytest.raises(RuntimeFault, match=r"Address already in use.*Choose another --host or --port")
    with bind(Listener(port=0)) as bound, in_use:
        bind(Listener(port=bound.getsockname()[1]))


def test_public_address_without_key_is_warned_of(tmp_path, capsys):
    def run(*options):
        assert main(["serve", str(tmp_path / "none"), "--port", "0", *options]) == 7, "there is no such bundle"
        return capsys.readouterr().err

    assert "warning: 0.0.0.0 is reached from other machines" in run("--host", "0.0.0.0")
    assert "warning" not in run("--host", "0.0.0.0", "--api-key", "secret") + run()


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("example.org", False),
    ],
)
def test_what_is_reached_from_here_alone(host, is_local):
    assert serve.is_loopback(host) == is_local


def test_a_missing_package_names_the_extra(monkeypatch):
    find_spec = serve.importlib.util.find_spec
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find_spec(name))
    with pytest.raises(RuntimeFault, match=r"no package uvicorn; .* pip install .*\[serve\]"):
        serve.check_packages()


def test_urls():
    with bind(Listener(port=0)) as bound:
        assert url_from_socket(bound) == f"http://127.0.0.1:{bound.getsockname()[1]}"
    if socket.has_ipv6:
        try:
            with bind(Listener("::1", 0)) as bound:
                assert url_from_socket(bound).startswith("http://[::1]:")
        except RuntimeFault as fault:
            pytest.skip(f"no IPv6 here: {fault.got}")
