# SPDX-License-Identifier: Apache-2.0
"""Write what transformers' greedy fp32 `generate` makes of examples/prompts.jsonl: python tests/e2e/make_golden.py."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples/models/pycode-16m"
GOLDEN = Path(__file__).parent / "golden/greedy.json"
NUM_TOKENS = 128


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    prompts = [json.loads(line)["prompt"] for line in (ROOT / "examples/prompts.jsonl").read_text().splitlines()]
    rows = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "pad_token_id": 2}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        rows.append({"prompt_ids": ids[0].tolist(), "tokens": out[0, ids.shape[1] :].tolist()})
    GOLDEN.write_text("[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
