# SPDX-License-Identifier: Apache-2.0
"""A target of a few thousand parameters, text of its words, and recipes that train on them in a second."""

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.pipeline import fakes

pytestmark = pytest.mark.export

HEADS = {
    "medusa": {"num_heads": 3, "num_layers": 1, "lm_head": "own"},
    "mlp": {"num_heads": 3, "inner_size": 12},
    "prophet": {"num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 24, "horizon": 4},
    "eagle3": {"layers": [0, 1, 2], "draft_vocab_size": 20, "intermediate_size": 24, "unrolled_steps": 3},
    "dflash": {
        "layers": [0, 2, 3], "num_layers": 1, "intermediate_size": 24, "block_size": 4, "mask_token_id": 2,
        "conv_group_size": 4, "selector_rank": 4, "selector_top_k": 5,
    },
    "glide": {"num_layers": 1, "intermediate_size": 24, "block": 3},
    "mtp": {"unrolled_steps": 3},
    "early_exit": {"num_exit_layers": 2, "intermediate_size": 24, "chain": 3},
    "draft_model": {"hidden_size": 8, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "chain": 3},
}  # fmt: skip
Recipe = Callable[..., Path]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("training")


@pytest.fixture(scope="session")
def target(folder: Path) -> Path:
    return fakes.make_checkpoint(folder / "target", hidden=16, layers=4)


@pytest.fixture(scope="session")
def text(folder: Path) -> Path:
    """500 documents, of which a few are held out; a word is followed by one of two."""
    rng, path = random.Random(0), folder / "text.jsonl"
    lines = []
    for _ in range(500):
        words = [rng.randrange(3, fakes.VOCAB)]
        for _ in range(60):
            words.append(3 + (words[-1] * 5 + rng.randrange(2)) % (fakes.VOCAB - 3))
        lines.append(json.dumps({"text": "\n".join(f"w{word}" for word in words)}))
    path.write_text("\n".join(lines))
    return path


CHAT_TEMPLATE = (
    "{% for m in messages %}{{ {'system': 'w3', 'user': 'w4', 'assistant': 'w5'}[m.role] }} {{ m.content }} w1 "
    "{% endfor %}{% if add_generation_prompt %}w5 {% endif %}"
)


@pytest.fixture(scope="session")
def chat_target(folder: Path) -> Path:
    made = fakes.make_checkpoint(folder / "chat-target", hidden=16, layers=4)
    (made / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return made


@pytest.fixture(scope="session")
def chats(folder: Path) -> Path:
    """300 conversations of up to three turns, of which a few are held out."""
    rng, path = random.Random(0), folder / "chats.jsonl"
    lines = []
    for _ in range(300):
        num = rng.choice((1, 1, 2, 3))
        words = [" ".join(f"w{rng.randrange(6, fakes.VOCAB)}" for _ in range(rng.randrange(1, 5))) for _ in range(num)]
        turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(words)]
        lines.append(json.dumps({"messages": turns}))
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="session", autouse=True)
def _cache(folder: Path) -> Iterator[None]:
    before = os.environ.get("SPECCOMPILE_CACHE")
    os.environ["SPECCOMPILE_CACHE"] = str(folder / "cache")
    yield
    if before is None:
        del os.environ["SPECCOMPILE_CACHE"]
    else:
        os.environ["SPECCOMPILE_CACHE"] = before


@pytest.fixture(scope="session")
def write_recipe(folder: Path, target: Path, text: Path) -> Recipe:
    def write(method: str, name: str, steps: int = 8, generated: int = 0) -> Path:
        training = {
            "method": method,
            "output": str(folder / "out" / name),
            "heads": HEADS[method],
            "text": {"files": [str(text)], "max_tokens": 20000, "held_out_tokens": 400},
            "plain": {"steps": steps, "seq_len": 24, "batch_size": 4, "learning_rate": 0.01, "warmup_steps": 2},
            "generated": {
                "steps": generated, "seq_len": 20, "batch_size": 4, "learning_rate": 0.003, "warmup_steps": 1,
                "prompt_tokens": 6, "num_sequences": 24, "batch_slots": 4,
            },
            "precision": "float32",
            "threads": 1,
            "measure_every": 4,
            "save_every": 4,
        }  # fmt: skip
        path = folder / f"{name}.yaml"
        path.write_text(json.dumps({"target": {"model": str(target)}, "training": training}))
        return path

    return write
