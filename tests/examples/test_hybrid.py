# SPDX-License-Identifier: Apache-2.0
"""pycode-hybrid is a folder that transformers loads, of the layout and the quality that the README states."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDER = EXAMPLES / "models/pycode-hybrid"
PROMPTS = [json.loads(line)["prompt"] for line in (EXAMPLES / "prompts.jsonl").read_text().splitlines()][::3]


@pytest.fixture(scope="module")
def scripts():
    """Returns the modules beside the training script, which are no package."""
    names = ("corpus", "forward", "train", "acceptance")
    sys.path.insert(0, str(EXAMPLES / "models/hybrid"))
    try:
        yield {name: __import__(name) for name in names}
    finally:
        sys.path.remove(str(EXAMPLES / "models/hybrid"))
        for name in names:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def rows():
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    return [torch.tensor([tokenizer.encode(text).ids]) for text in PROMPTS]


def test_the_layout_is_qwen3_5s_with_a_module(model):
    assert type(model).__name__ == "Qwen3_5ForCausalLM"
    assert model.config.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 2
    assert model.config.mtp_num_hidden_layers == 1
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        keys = set(file.keys())
        assert {file.get_tensor(key).dtype for key in keys} == {torch.bfloat16}
    assert len([key for key in keys if key.startswith("mtp.")]) == 15
    held = {key for key in keys if not key.startswith("mtp.")}
    assert held == set(model.state_dict()) - {"lm_head.weight"}


def test_its_tokenizer_is_pycode_16ms():
    first, second = (EXAMPLES / "models" / name / "tokenizer.json" for name in ("pycode-hybrid", "pycode-16m"))
    assert first.read_bytes() == second.read_bytes()


@torch.no_grad()
def test_the_loss_on_the_prompts_is_that_of_a_trained_model(model, rows):
    losses = [float(model(ids, labels=ids).loss) for ids in rows]
    assert sum(losses) / len(losses) < 2.7


@torch.no_grad()
def test_the_training_forward_is_transformers(scripts, model, rows):
    fast = scripts["forward"].Forward(model, 256, torch.float32)
    for ids in rows[:3]:
        torch.testing.assert_close(fast.states(ids), model.model(ids).last_hidden_state, atol=1e-4, rtol=1e-4)


def test_chunks_of_the_training_forward_do_not_change_it(scripts):
    delta = scripts["forward"].gated_delta
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(2, 75, 2, 8, generator=generator), dim=-1) for _ in range(2))
    v = torch.randn(2, 75, 4, 8, generator=generator)
    g, beta = -torch.rand(2, 75, 4, generator=generator), torch.rand(2, 75, 4, generator=generator)
    wanted = delta(q, k, v, g, beta, chunk=75)
    for chunk in (1, 16, 64):
        torch.testing.assert_close(delta(q, k, v, g, beta, chunk=chunk), wanted, atol=1e-5, rtol=1e-5)


def test_the_module_drafts_what_the_model_writes(scripts, model, rows):
    acceptance = scripts["acceptance"]
    target = acceptance.Target(FOLDER, torch.float32)
    module = acceptance.load_module(target, 4)
    kept, tried = torch.zeros(2, 4)
    for ids in rows[:4]:
        text = model.generate(ids, max_new_tokens=32, do_sample=False)[0].tolist()
        hits = acceptance.find_hits(target, module, text)[ids.shape[1] - 1 :]
        accepted, drafted = acceptance.draft_verify(hits, 4)
        kept += torch.tensor(accepted)
        tried += torch.tensor(drafted)
    assert kept[0] / tried[0] > 0.4
    assert kept.sum() / tried[0] > 0.8


def test_the_walk_counts_what_greedy_draft_verify_accepts(scripts):
    hits = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1], [0, 1, 1], [1, 0, 1]]).bool()
    # Step 0 keeps two drafts and goes on at 3, which keeps none and goes on at 4, which keeps one.
    assert scripts["acceptance"].draft_verify(hits, 3) == ([2, 1, 0], [3, 2, 1])
    assert scripts["acceptance"].draft_verify(hits, 1) == ([3], [3])
