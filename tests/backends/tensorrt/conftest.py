# SPDX-License-Identifier: Apache-2.0
"""The target of most tests, and a machine of fakes to run it on."""

import pytest


@pytest.fixture
def target(compiled):
    return compiled("onnxruntime", "none", "fp32", "target")


@pytest.fixture
def lab(monkeypatch, tmp_path):
    from tests.backends.tensorrt.trt_lab import Lab

    return Lab(monkeypatch, tmp_path)
