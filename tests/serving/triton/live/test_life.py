# SPDX-License-Identifier: Apache-2.0
"""Starting, draining, dying, coming back; and what refuses to start."""

import json
import os
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.triton_server import STOP_S, TritonServer, post, serving
from tests.serving.triton.live.clients import Sse, stream_text, wait_until
from tests.serving.triton.live.conftest import BUNDLE, OFFLINE


def generate(server, **body):
    return post(f"{server.url}/v2/models/speccompile/generate", body)


def fails_to_start(launcher, models, log):
    """Returns the log of a server that must not come up."""
    server = TritonServer(launcher, models, log)
    try:
        with pytest.raises(RuntimeError, match="the server ended with"):
            server.wait_ready()
        return log.read_text(errors="replace")
    finally:
        server.kill()


def test_sigterm_under_load_lets_all_finish_and_exits_with_0(launcher, repository, prompts, offline, tmp_path):
    num_tokens = 200
    wanted = [result["text"] for result in offline(prompts, num_tokens)]
    server = TritonServer(launcher, repository, tmp_path / "log")
    try:
        server.wait_ready()
        with ThreadPoolExecutor(len(prompts)) as pool:
            streams = [Sse(server, {"text_input": prompt, "max_tokens": num_tokens}) for prompt in prompts]
            texts = [pool.submit(read_to_the_end, stream) for stream in streams]
            server.process.send_signal(signal.SIGTERM)
            assert [text.result() for text in texts] == wanted
        assert server.process.wait(STOP_S) == 0
        assert "successfully unloaded 'speccompile'" in server.log_end(100_000)
    finally:
        server.kill()


def test_a_killed_server_leaves_no_model_running_and_the_next_serves(launcher, repository, prompts, tmp_path):
    first = TritonServer(launcher, repository, tmp_path / "first.log")
    try:
        first.wait_ready()
        _, answer = generate(first, text_input=prompts[0], max_tokens=30)
        stream = Sse(first, {"text_input": prompts[0], "max_tokens": 950, "ignore_eos": True})
        models = first.model_pids()
        assert models
        os.kill(first.process.pid, signal.SIGKILL)  # the server alone: its models must see it themselves
        first.process.wait()
        with serving(launcher, repository, tmp_path / "second.log") as second:
            assert generate(second, text_input=prompts[0], max_tokens=30)[1] == answer
        stream.close()
        wait_until(lambda: not any(is_running(pid) for pid in models), "the end of the killed server's models")
    finally:
        first.kill()


def read_to_the_end(stream):
    text = "".join(event["text_output"] for event in stream.events())
    stream.close()  # Triton waits for connections that are kept open, even idle ones
    return text


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_model_is_unloaded_and_loaded_again(launcher, repository, prompts, tmp_path):
    explicit = ["--model-control-mode=explicit", "--load-model=speccompile"]
    with serving(launcher, repository, tmp_path / "log", explicit) as server:
        _, before = generate(server, text_input=prompts[0], max_tokens=40)
        stream = Sse(server, {"text_input": prompts[1], "max_tokens": 300})
        events = stream.events()
        text = next(events)["text_output"]
        assert post(f"{server.url}/v2/repository/models/speccompile/unload", {})[0] == 200
        text += "".join(event["text_output"] for event in events)  # what runs is finished first
        stream.close()
        wait_until(lambda: generate(server, text_input="x", max_tokens=1)[0] != 200, "a model that is gone")
        assert post(f"{server.url}/v2/repository/models/speccompile/load", {})[0] == 200
        assert generate(server, text_input=prompts[0], max_tokens=40)[1] == before
        assert stream_text(server, {"text_input": prompts[1], "max_tokens": 300}) == text


def test_an_environment_that_would_change_tensors_is_refused(launcher, write_models, tmp_path):
    models = write_models("--link", "--python-env", str(OFFLINE.absolute().parents[1]))
    log = fails_to_start(launcher, models, tmp_path / "log")
    assert "tensors that arrive as they were sent" in log
    assert "[1, 1, 1, 1] where [1, 2, 3, 4] was sent" in log
    assert "install 'numpy<2' in the environment that the model runs in" in log


def test_a_bundle_that_was_changed_is_refused(launcher, write_models, tmp_path):
    models = write_models("--name", "changed")
    file = models / "changed/1/bundle/tokenizer/tokenizer.json"
    file.write_text(file.read_text() + " ")
    assert "tokenizer.json: got" in fails_to_start(launcher, models, tmp_path / "log")


def test_an_environment_without_speccompile_is_named(launcher, repository, tmp_path):
    home = launcher.parents[1]
    env, models = tmp_path / "env", tmp_path / "models"
    packages = next(home.glob("lib/python*/site-packages"))
    subprocess.run([str(home / "bin/python3"), "-m", "venv", "--without-pip", str(env)], check=True)
    for folder in packages.glob("numpy*"):  # what the stub itself needs
        (env / packages.relative_to(home) / folder.name).symlink_to(folder)
    shutil.copytree(repository, models)
    config = models / "speccompile/config.pbtxt"
    value = json.dumps(str(env))
    config.write_text(
        config.read_text() + f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: {value} }} }}\n'
    )
    log = fails_to_start(launcher, models, tmp_path / "log")
    assert "No module named 'speccompile'" in log
    assert "write the repository with --python-env DIR" in log


def test_the_example_bundle_is_there():
    assert (BUNDLE / "manifest.json").is_file()
