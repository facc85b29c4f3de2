# SPDX-License-Identifier: Apache-2.0
"""The comparison of losses trains each with the same seeds and makes a table of the gains."""

import json
import sys

import pytest

from bench import losses
from tests.pipeline import fakes
from tests.training.conftest import HEADS

pytest.importorskip("matplotlib")
pytest.importorskip("tensorboard")
pytestmark = pytest.mark.export


def test_gains_are_over_the_first_loss_seed_by_seed():
    found = {
        "kl": [{"greedy": 2.0, "drawn": 2.0, "acceptance": [0.6]}, {"greedy": 2.2, "drawn": 4.0, "acceptance": [0.8]}],
        "lk": [{"greedy": 2.4, "drawn": 2.2, "acceptance": [0.7]}, {"greedy": 2.6, "drawn": 5.2, "acceptance": [0.9]}],
    }
    first, second = losses.rows_of(found)
    assert first["gain"] == first["spread"] == 0.0
    assert second["gain"] == pytest.approx(0.2) and second["spread"] == pytest.approx(0.1414, abs=1e-4)
    assert "| lk | 2.500 | 3.700 | +20.0 % | 14.1 % | 0.800 |" in losses.text_of([first, second])


def test_each_loss_is_trained(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path / "cache"))
    fakes.make_checkpoint(tmp_path / "target", hidden=16, layers=4)
    text = "\n".join(json.dumps({"text": " ".join(f"w{(i * j) % 29 + 3}" for j in range(40))}) for i in range(300))
    (tmp_path / "text.jsonl").write_text(text)
    plain = {"steps": 3, "seq_len": 24, "batch_size": 4}
    training = {
        "method": "mlp", "output": "out", "heads": HEADS["mlp"], "text": {"files": ["text.jsonl"]}, "plain": plain,
        "generated": {"steps": 0}, "threads": 1, "precision": "float32",
    }  # fmt: skip
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(json.dumps({"target": {"model": "target"}, "training": training}))
    names, out = ["kl", "lk_hybrid+chain"], tmp_path / "found.json"
    options = ["--output", str(tmp_path / "trained"), "--losses", ",".join(names), "--seeds", "0,1", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["losses.py", str(recipe), *options])
    losses.main()
    found = json.loads(out.read_text())["tiny"]
    assert list(found) == names and all(len(runs) == 2 for runs in found.values())
    assert found["kl"] != found["lk_hybrid+chain"] and found["kl"][0] != found["kl"][1]
    plan = json.loads((tmp_path / "trained" / "tiny-lk_hybrid+chain-1" / "training.json").read_text())["plan"]
    assert (plan["loss"], plan["chain_weights"], plan["seed"]) == ("lk_hybrid", True, 1)
    assert "| lk_hybrid+chain |" in capsys.readouterr().out
