# SPDX-License-Identifier: Apache-2.0
"""The vectors of `speccompile vectors` on every implementation of SpecVerify that runs here."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from speccompile.cli.main import app
from speccompile.core.vectors import FORMS, VOCAB, make_vectors
from speccompile.ops.spec_verify import spec_verify
from tests.lab.graphs import open_session
from tests.ops.op_lab import model_of
from tests.ops.tensorrt.lab import body_model
from tests.plugins import cpu_lab, host_lab

Run = Callable[[dict[str, np.ndarray]], Sequence[np.ndarray]]
VECTORS = make_vectors()["vectors"]


def feeds(vector: dict[str, Any]) -> dict[str, np.ndarray]:
    probs, draft = np.array([vector["target_probs"]], np.float32), vector["draft_probs"]
    logits = np.log(np.maximum(probs, 1e-38))
    return {
        "logits": logits,
        "tokens": np.array([vector["tokens"]]),
        "parents": np.array([vector["parents"]]),
        "draft_probs": np.zeros((*probs.shape[:2], 1), np.float32) if draft is None else np.array([draft], np.float32),
        "uniforms": np.array([vector["uniforms"]], np.float32),
        "temperature": np.array([0 if vector["rule"] == "greedy" else 1], np.float32),
        "top_k": np.array([0]),
        "top_p": np.ones(1, np.float32),
    }


def check(run: Run) -> None:
    for number, vector in enumerate(VECTORS):
        if vector["rule"] != "paths":  # a reference that no engine runs
            path, num_accepted, token = run(feeds(vector))
            kept = [int(node) for node in path[0] if node >= 0]
            wanted = (vector["path"], vector["num_accepted"], vector["next_token"])
            assert (kept, int(num_accepted[0]), int(token[0])) == wanted, f"vector {number}, {vector['rule']}"


def test_vectors_are_of_every_rule_and_outcome():
    for rule in FORMS:
        kept = {vector["num_accepted"] for vector in VECTORS if vector["rule"] == rule}
        assert min(kept) == 0 and max(kept) > 1, rule
    for vector in VECTORS:
        assert sum(vector["next_probs"]) == pytest.approx(1, abs=1e-6)
        assert vector["next_probs"][vector["next_token"]] > 0


def test_the_command_writes_them(tmp_path):
    path = tmp_path / "vectors.json"
    assert CliRunner().invoke(app, ["vectors", "--out", str(path)]).exit_code == 0
    assert json.loads(path.read_text()) == make_vectors()
    printed = CliRunner().invoke(app, ["vectors", "--rule", "chain"])
    assert json.loads(printed.stdout) == make_vectors(["chain"])


def test_the_twin_decides_as_the_vectors_say():
    check(lambda case: spec_verify(**case))


@pytest.mark.plan
@pytest.mark.parametrize("dialect", ["onnx", "tensorrt"])
def test_bodies_decide_as_the_vectors_say(dialect):
    model = model_of("SpecVerify") if dialect == "onnx" else body_model("SpecVerify", {"vocab": VOCAB}, max_nodes=8)
    session = open_session(model)
    check(lambda case: session.run(None, case))


@pytest.mark.plan
@cpu_lab.needs_compiler
def test_the_cpu_kernel_decides_as_the_vectors_say():
    session = open_session(model_of("SpecVerify"), cpu_lab.library())
    check(lambda case: session.run(None, case))


@pytest.mark.plan
def test_the_cuda_kernels_decide_as_the_vectors_say():
    kernels = host_lab.kernels()
    check(lambda case: host_lab.verify(kernels, case))
