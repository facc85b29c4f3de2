# SPDX-License-Identifier: Apache-2.0
"""Draw conversations from SmolLM2 on a GPU: prompts of its own, and answers to all prompts.

    python examples/prompts/make_prompts.py prompts.jsonl --num 10000
    python examples/prompts/draw_chats.py MODEL chats.jsonl --prompts prompts.jsonl --own 24000

MODEL is the GGUF file (`examples/real_model.py` prints its path), a folder or an id of the hub. Prompts of its own
continue the template's opening of a user's turn. Answers are drawn at temperature 0 (half of them), 0.7 and 1 (a
quarter each). Output: one JSON object with `messages` a line, as `training.text.files` takes them. On a CPU
`speccompile train` draws answers with the bundle's own engine instead.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from speccompile.checkpoints.folders import resolve_checkpoint
from speccompile.checkpoints.model_config import read_model_config
from speccompile.export.weights import read_weights

# Beginnings of a user's turn: the model alone would mostly ask for texts.
STARTS = (
    *("",) * 6,
    *("Write", "Write a short", "Write a Python function", "def", "Implement", "Fix", "Make", "Create", "Generate"),
    *("How", "How do I", "What is", "What are", "What's", "Why", "Explain", "Can you explain", "Can you", "Could you"),
    *("Solve", "Calculate", "Find", "If", "A", "Given", "Suppose", "In", "The", "Here is", "Convert", "Compare"),
    *("Rewrite", "Rewrite the following", "Translate", "Translate the following", "Summarize", "Edit", "Improve"),
    *("Summarize the following", "Please", "Please rewrite", "Correct", "List", "Describe", "Give me", "Name"),
    *("I", "I'm", "I need", "Tell me", "Hi", "Help me", "Design"),
)
PROMPT_HEATS, ANSWER_HEATS = (1.0, 0.8, 1.0, 0.9), (0.0, 0.0, 0.7, 1.0)
PROMPT_TOKENS, MAX_PROMPT = 160, 384  # drawn for a prompt at most; longest prompt with its template
PREFILL_ROWS, COMPACT_STEPS = 256, 32

Tensor = torch.Tensor


class Llama:
    """A Llama's forward over caches [batch, kv heads, tokens, head size] that are laid out once.

    Args:
        model: of transformers, in float32.
    """

    def __init__(self, model: Any, device: str, dtype: torch.dtype) -> None:
        config, self.device, self.dtype = model.config, device, dtype
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.eps = config.hidden_size // self.num_heads, config.rms_norm_eps
        halves = torch.arange(0, self.head_dim, 2).float() / self.head_dim
        self.frequencies = (1.0 / config.rope_parameters["rope_theta"] ** halves).to(device)
        self.embeddings, self.head = self._put(model.model.embed_tokens.weight), self._put(model.lm_head.weight)
        self.norm = self._put(model.model.norm.weight)
        self.layers = []
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            qkv = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
            gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
            norms = (layer.input_layernorm.weight, layer.post_attention_layernorm.weight)
            parts = (norms[0], qkv, attention.o_proj.weight, norms[1], gate_up, mlp.down_proj.weight)
            self.layers.append([self._put(part) for part in parts])

    def _put(self, weight: Tensor) -> Tensor:
        return weight.detach().to(self.device, self.dtype).contiguous()

    def caches(self, batch: int, tokens: int) -> list[list[Tensor]]:
        """Returns keys and values of each layer."""
        shape = (batch, self.num_kv_heads, tokens, self.head_dim)
        return [[torch.zeros(shape, device=self.device, dtype=self.dtype) for _ in "kv"] for _ in self.layers]

    def run(self, ids: Tensor, positions: Tensor, caches: list[list[Tensor]], first: int, mask: Tensor) -> Tensor:
        """Returns the logits after the last token [batch, vocabulary].

        Args:
            ids: [batch, nodes].
            first: row of the caches where the nodes' keys go.
            mask: [batch, 1, nodes, tokens] bool, whether a node sees a row.
        """
        batch, nodes = ids.shape
        kv, tokens, size = self.num_kv_heads, mask.shape[-1], self.num_kv_heads * self.head_dim
        group = self.num_heads // kv
        x = self.embeddings[ids]
        angles = positions[..., None].float() * self.frequencies
        cos, sin = (turn.repeat(1, 1, 2)[:, None].to(self.dtype) for turn in (angles.cos(), angles.sin()))
        for (norm, qkv, out, mlp_norm, gate_up, down), (keys, values) in zip(self.layers, caches, strict=True):
            heads = (F.rms_norm(x, norm.shape, norm, self.eps) @ qkv.T).split([group * size, size, size], -1)
            q, k, v = (part.view(batch, nodes, -1, self.head_dim).transpose(1, 2) for part in heads)
            q, k = (_rotate(part, cos, sin) for part in (q, k))
            keys[:, :, first : first + nodes], values[:, :, first : first + nodes] = k, v
            seen = keys[:, :, :tokens], values[:, :, :tokens]
            if nodes == 1:  # the heads of a group are queries of one key head
                grouped = q.reshape(batch, kv, group, self.head_dim)
                wide = mask.expand(batch, kv, group, tokens)
                mixed = F.scaled_dot_product_attention(grouped, *seen, attn_mask=wide).reshape(q.shape)
            else:
                repeated = (part.repeat_interleave(group, 1) for part in seen)
                mixed = F.scaled_dot_product_attention(q, *repeated, attn_mask=mask)
            x = x + mixed.transpose(1, 2).reshape(batch, nodes, -1) @ out.T
            gate, up = (F.rms_norm(x, mlp_norm.shape, mlp_norm, self.eps) @ gate_up.T).chunk(2, -1)
            x = x + (F.silu(gate) * up) @ down.T
        return F.rms_norm(x[:, -1], self.norm.shape, self.norm, self.eps) @ self.head.T


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


@torch.no_grad()
def draw(
    model: Llama, prompts: Sequence[Sequence[int]], heats: Sequence[float], num: int, stops: Tensor, generator: Any
) -> list[tuple[list[int], bool]]:
    """Returns continuations of at most `num` tokens without the stop, and whether each ended by itself.

    Args:
        heats: temperatures; 0 is greedy.
        stops: tokens that end a text, [stops] on the model's device.
    """
    device, batch, width = model.device, len(prompts), _rounded(max(map(len, prompts)))
    ids, padding = torch.zeros(batch, width, dtype=torch.int64), torch.zeros(batch, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        padding[row] = width - len(prompt)
        ids[row, padding[row] :] = torch.tensor(prompt)
    ids, padding, heat = ids.to(device), padding.to(device), torch.tensor(heats, device=device)
    caches, rows = model.caches(batch, width + _rounded(num)), torch.arange(width + _rounded(num), device=device)
    logits = _prefill(model, ids, padding, caches, rows[:width])
    alive, ended = torch.arange(batch, device=device), torch.zeros(batch, dtype=torch.bool, device=device)
    tokens = torch.full((batch, num), -1, device=device)
    for step in range(num):
        scores = logits.float()
        gumbel = -torch.empty_like(scores).exponential_(generator=generator).log()
        drawn = (scores / heat[:, None].clamp(min=1e-3) + gumbel).argmax(-1)
        token = torch.where(heat > 0, drawn, scores.argmax(-1))
        ended = ended | torch.isin(token, stops)
        tokens[alive, step] = torch.where(ended, -1, token)
        if step % COMPACT_STEPS == COMPACT_STEPS - 1:  # texts that ended leave the batch
            kept = (~ended).nonzero()[:, 0]
            alive, heat, ended, token, padding = (part[kept] for part in (alive, heat, ended, token, padding))
            caches = [[part[kept] for part in layer] for layer in caches]
        if step + 1 == num or len(alive) == 0:
            break
        at, seen = width + step, rows[: min(len(rows), _rounded(width + step + 1))]
        mask = (seen >= padding[:, None]) & (seen <= at)
        logits = model.run(token[:, None], (at - padding)[:, None], caches, at, mask[:, None, None])
    texts = [[token for token in row if token >= 0] for row in tokens.tolist()]
    return [(text, len(text) < num) for text in texts]


def _prefill(model: Llama, ids: Tensor, padding: Tensor, caches: list[list[Tensor]], rows: Tensor) -> Tensor:
    logits = []
    for first in range(0, len(ids), PREFILL_ROWS):
        part = slice(first, first + PREFILL_ROWS)
        causal = (rows[None, :] <= rows[:, None])[None] & (rows >= padding[part, None, None])
        mask = causal | torch.eye(len(rows), dtype=torch.bool, device=rows.device)  # a row of padding sees itself
        views = [[held[part] for held in layer] for layer in caches]
        positions = (rows - padding[part, None]).clamp(min=0)
        logits.append(model.run(ids[part], positions, views, 0, mask[:, None]))
    return torch.cat(logits)


def _rounded(num: int) -> int:
    return -(-num // 8) * 8


def draw_all(
    model: Llama, prompts: Sequence[Sequence[int]], heats: Sequence[float], num: int, stops: Tensor, batch: int
) -> list[tuple[list[int], bool]]:
    """Returns `draw` of all prompts, in batches of similar length."""
    generator = torch.Generator(device=model.device).manual_seed(len(prompts))
    order, found = sorted(range(len(prompts)), key=lambda i: -len(prompts[i])), {}
    for first in range(0, len(order), batch):
        part, start = order[first : first + batch], time.perf_counter()
        drawn = draw(model, [prompts[i] for i in part], [heats[i] for i in part], num, stops, generator)
        found.update(zip(part, drawn, strict=True))
        num_tokens, seconds = sum(len(text) for text, _ in drawn), time.perf_counter() - start
        print(f"{len(found)} of {len(prompts)}, {num_tokens / seconds:.0f} tokens/s", flush=True)
    return [found[i] for i in range(len(prompts))]


def own_prompts(model: Llama, tokenizer: Any, num: int, stops: Tensor, batch: int) -> list[str]:
    """Returns distinct user messages that the model wrote to their end."""
    template = tokenizer.apply_chat_template([{"role": "user", "content": "@@"}], tokenize=False)
    opening = template.split("@@")[0]
    starts = [STARTS[i % len(STARTS)] for i in range(num)]
    heats = [PROMPT_HEATS[i // len(STARTS) % len(PROMPT_HEATS)] for i in range(num)]
    ids = {start: tokenizer(opening + start, add_special_tokens=False).input_ids for start in STARTS}
    drawn = draw_all(model, [ids[start] for start in starts], heats, PROMPT_TOKENS, stops, batch)
    texts = {}
    for start, (tokens, is_whole) in zip(starts, drawn, strict=True):
        text = (start + tokenizer.decode(tokens)).strip()
        if is_whole and "<|" not in text and 12 <= len(text) <= 900:
            texts[text] = True
    return list(texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("output", type=Path)
    parser.add_argument("--prompts", type=Path, nargs="*", default=[], help="JSON lines with `messages`")
    parser.add_argument("--own", type=int, default=0, help="prompts to draw; about three quarters are kept")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=320)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    folder = resolve_checkpoint(args.model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = Llama(read_weights(folder, read_model_config(folder), torch.float32)[0], args.device, dtype)
    stops = torch.tensor(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]), device=args.device)
    chats = [json.loads(line)["messages"] for file in args.prompts for line in file.read_text().splitlines()]
    if args.own:
        texts = own_prompts(model, tokenizer, args.own, stops, args.batch)
        chats += [[{"role": "user", "content": text}] for text in texts]
    whole = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in whole]
    kept = [i for i in range(len(ids)) if len(ids[i]) <= MAX_PROMPT]
    heats = [ANSWER_HEATS[i % len(ANSWER_HEATS)] for i in range(len(kept))]
    drawn = draw_all(model, [ids[i] for i in kept], heats, args.new_tokens, stops, args.batch)
    with args.output.open("w", encoding="utf-8") as file:
        for i, (tokens, _) in zip(kept, drawn, strict=True):
            answer = {"role": "assistant", "content": tokenizer.decode(tokens)}
            if tokens:
                file.write(json.dumps({"messages": [*chats[i], answer]}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
