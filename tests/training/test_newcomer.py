# SPDX-License-Identifier: Apache-2.0
"""A newcomer's way: conversations in JSONL, then `train`, `build`, `serve`, and an answer with accepted drafts."""

import json
import random
from pathlib import Path

import pytest

from speccompile.cli.main import main
from tests import store
from tests.pipeline import fakes
from tests.serving.live_server import live_server
from tests.training.conftest import CHAT_TEMPLATE

pytest.importorskip("matplotlib")
pytest.importorskip("tensorboard")
pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.live


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, 200 conversations and a recipe."""
    model = fakes.make_checkpoint(tmp_path / "model", hidden=16, layers=4)
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    rng, lines = random.Random(1), []
    for _ in range(200):
        words = [" ".join(f"w{rng.randrange(6, fakes.VOCAB)}" for _ in range(4)) for _ in range(2)]
        turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), words, strict=True)]
        lines.append(json.dumps({"messages": turns}))
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    training = {
        "method": "eagle3",
        "output": "drafter",
        "heads": {"layers": [0, 1, 2], "intermediate_size": 24, "unrolled_steps": 3},
        "text": {"files": ["chats.jsonl"]},
        "plain": {"steps": 0},
        "generated": {
            "steps": 60, "seq_len": 28, "batch_size": 8, "learning_rate": 0.01, "num_sequences": 400, "batch_slots": 8,
        },
        "loss": "lk_hybrid",
        "precision": "float32",
        "threads": 1,
    }  # fmt: skip
    (tmp_path / "train.yaml").write_text(json.dumps({"target": {"model": "model"}, "training": training}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_train_build_serve(here):
    with store.cheap_measurements():
        assert main(["train", "train.yaml"]) == 0
        sizes = ["engine.max_seq_len=60", "engine.max_draft_nodes=4", "engine.threads=1"]
        settings = [part for size in sizes for part in ("--set", size)]
        assert main(["build", "model", "--draft", "drafter", "-o", "bundle", *settings]) == 0
    held_out = json.loads((here / "drafter" / "training.json").read_text())["held_out"]["generated"]
    assert held_out["acceptance_length"] > 1.5 and held_out["sampled_length"] > 1.0
    ask = {
        "messages": [{"role": "user", "content": "w9 w12 w20"}],
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
    }
    with live_server(here / "bundle") as server:
        texts = []
        for speculation in ("on", "off"):
            status, answer = server.ask("POST", "/v1/chat/completions", {**ask, "speculation": speculation})
            assert status == 200, answer
            texts.append(answer["choices"][0]["message"]["content"])
        assert texts[0] == texts[1] and texts[0]
        assert server.metric("draft_tokens_total") >= server.metric("accepted_tokens_total") > 0
        assert server.stop() == 0
