# SPDX-License-Identifier: Apache-2.0
"""`speccompile serve` on a tiny checkpoint with random weights: built at the first start, found at the second."""

import pytest

from tests.pipeline import fakes
from tests.serving.live_server import live_server

pytestmark = [pytest.mark.export, pytest.mark.live]


def test_a_checkpoint_is_served_and_built_once(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SPECCOMPILE_CPU_KERNELS", "off")  # their compilation takes longer than all the rest
    model = fakes.make_checkpoint(tmp_path / "tiny", hidden=32, layers=1)
    body = {"model": "tiny", "prompt": [3, 4, 5], "max_tokens": 8, "ignore_eos": True}
    texts = []
    for start in range(2):
        with live_server(model, "--quantization", "none", "--set", "engine.threads=1") as server:
            assert any("export target" in line for line in server.lines) == (start == 0), "".join(server.lines)
            status, answer = server.ask("POST", "/v1/completions", body)
            assert status == 200, answer
            texts.append(answer["choices"][0]["text"])
            assert server.stop() == 0
    assert texts[0] == texts[1]
