# SPDX-License-Identifier: Apache-2.0
"""Trains pycode-hybrid, a Qwen3.5 layout of 15 M parameters, from pycode-16m on CPU processes.

    python examples/models/hybrid/train.py corpus --work build/hybrid
    python examples/models/hybrid/train.py check --work build/hybrid
    python examples/models/hybrid/train.py train --work build/hybrid --steps 120 --parts 2
    python examples/models/hybrid/train.py train --work build/hybrid
    python examples/models/hybrid/train.py export --work build/hybrid --out build/hybrid/model
    torchrun --nproc-per-node 2 -m speccompile train examples/models/hybrid/mtp.yaml
    python examples/models/hybrid/train.py measure --work build/hybrid --out build/hybrid/pycode-hybrid

`train` starts from pycode-16m: embeddings, norms and the most active MLP neurons are copied, the mixers take the
attention's projections. Its first steps (align) fit every mixer alone to the attention of its layer, given the
teacher's own input; the rest train the whole model on the teacher's distribution mixed with the text's next token.
It writes a checkpoint every few minutes and goes on from it when it is started again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread a process: two threads of one would wait at every op

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from corpus import write_tokens
from forward import Forward, head_loss
from torch import multiprocessing, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

TEACHER = Path(__file__).parents[1] / "pycode-16m"
MLP_WIDTH = 896


def make_config() -> Qwen3_5TextConfig:
    """Returns Qwen3.5's text layout at the teacher's width."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    return Qwen3_5TextConfig(
        vocab_size=8192, hidden_size=384, intermediate_size=MLP_WIDTH, num_hidden_layers=8, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64,
        linear_value_head_dim=64, linear_conv_kernel_dim=4, full_attention_interval=4, max_position_embeddings=2048,
        rope_parameters={**rope, "mrope_section": [3, 3, 2], "mrope_interleaved": True}, tie_word_embeddings=True,
        mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip


@torch.no_grad()
def init_from_teacher(student: Qwen3_5ForCausalLM, teacher: LlamaForCausalLM, ids: torch.Tensor) -> None:
    """Copies what fits from the teacher; `ids` [B, T] measure activations."""
    student.model.embed_tokens.weight.copy_(teacher.model.embed_tokens.weight)
    student.model.norm.weight.copy_(teacher.model.norm.weight - 1)
    forward = Forward(teacher, ids.shape[1], torch.float32)
    x = forward.embed(ids)
    for old, new in zip(teacher.model.layers, student.model.layers, strict=True):
        new.input_layernorm.weight.copy_(old.input_layernorm.weight - 1)
        new.post_attention_layernorm.weight.copy_(old.post_attention_layernorm.weight - 1)
        if hasattr(new, "linear_attn"):
            init_delta_net(new.linear_attn, old.self_attn)
        else:
            init_attention(new.self_attn, old.self_attn, old.input_layernorm(x))
        x = x + forward.mix(old, x)
        y = old.post_attention_layernorm(x)
        m = old.mlp
        active = (F.silu(m.gate_proj(y)) * m.up_proj(y)).square().mean((0, 1)).sqrt() * m.down_proj.weight.norm(dim=0)
        kept = active.topk(MLP_WIDTH).indices.sort().values
        new.mlp.gate_proj.weight.copy_(m.gate_proj.weight[kept])
        new.mlp.up_proj.weight.copy_(m.up_proj.weight[kept])
        new.mlp.down_proj.weight.copy_(m.down_proj.weight[:, kept])
        x = forward.feed(old, x)


def init_attention(new: nn.Module, old: nn.Module, x: torch.Tensor) -> None:
    """The teacher's rotary pairs (4j, 4j + 32) have the frequencies of the 8 pairs here; a zero gate halves: o x 2."""
    pairs = torch.arange(0, 32, 4)
    rest = torch.tensor([i for i in range(64) if i % 32 not in pairs.tolist()])
    order = torch.cat((pairs, pairs + 32, rest))
    query, key = (p.weight.unflatten(0, (-1, 64))[:, order] for p in (old.q_proj, old.k_proj))
    new.q_proj.weight.copy_(torch.stack((query, torch.zeros_like(query)), 1).flatten(0, 2))
    new.k_proj.weight.copy_(key.flatten(0, 1))
    new.v_proj.weight.copy_(old.v_proj.weight)
    new.o_proj.weight.copy_(2 * old.o_proj.weight)
    for norm, proj in ((new.q_norm, old.q_proj), (new.k_norm, old.k_proj)):
        size = proj(x).unflatten(-1, (-1, 64)).square().mean(-1).sqrt().mean()
        norm.weight.fill_(float(size) - 1)


def init_delta_net(new: nn.Module, old: nn.Module) -> None:
    """Keys and values are the teacher's, queries the means of its groups; the convolution begins as the identity."""
    query = old.q_proj.weight.unflatten(0, (2, 3, 64))  # [key heads, group, width, D]
    value = old.v_proj.weight.unflatten(0, (2, 64))
    parts = (query.mean(1).flatten(0, 1), old.k_proj.weight, value.repeat_interleave(2, 0).flatten(0, 1))
    new.in_proj_qkv.weight.copy_(torch.cat(parts))
    out = old.o_proj.weight.unflatten(1, (2, 3, 64))
    out = torch.stack((out[:, :, 0] + out[:, :, 1] / 2, out[:, :, 2] + out[:, :, 1] / 2), 2)
    new.out_proj.weight.copy_(out.flatten(1))
    nn.init.normal_(new.in_proj_z.weight, std=0.05)
    nn.init.normal_(new.in_proj_a.weight, std=0.01)
    nn.init.normal_(new.in_proj_b.weight, std=0.01)
    new.conv1d.weight.normal_(std=0.05)
    new.conv1d.weight[..., -1] += 1
    new.A_log.fill_(0.0)
    spans = torch.tensor([4.0, 64.0, 16.0, 256.0])  # tokens until a value head has forgotten 1 - 1/e
    new.dt_bias.copy_(torch.log(torch.expm1(1 / spans)))


class Tokens:
    """Windows of a token file in a random order of their own.

    Args:
        path: uint16 tokens.
        num: tokens of a window, one more is returned.
        seed: of the order.
    """

    def __init__(self, path: Path, num: int, seed: int) -> None:
        self.data, self.num = np.fromfile(path, dtype=np.uint16), num
        self.order = np.random.default_rng(seed).permutation((len(self.data) - 1) // num)

    def rows(self, start: int, count: int) -> torch.Tensor:
        """Returns windows [count, num + 1] int64; one in seven begins with <s>, which a prompt may carry or not."""
        picks = [int(self.order[i % len(self.order)]) * self.num for i in range(start, start + count)]
        found = np.stack([self.data[p : p + self.num + 1] for p in picks]).astype(np.int64)
        found[[i for i in range(count) if (start + i) % 7 == 0], 0] = 0
        return torch.from_numpy(found)


def align_loss(student: Forward, teacher: Forward, ids: torch.Tensor) -> torch.Tensor:
    """Returns the mean over layers of |mixer(x) - attention(x)|^2 / |attention(x)|^2, x the teacher's own."""
    with torch.no_grad():
        inputs, wanted, x = [], [], teacher.embed(ids)
        for layer in teacher.model.layers:
            inputs.append(x)
            wanted.append(teacher.mix(layer, x))
            x = teacher.feed(layer, x + wanted[-1])
    total = torch.zeros(())
    for layer, x, y in zip(student.model.layers, inputs, wanted, strict=True):
        found = student.mix(layer, x)
        total = total + (found - y).float().square().sum() / y.float().square().sum()
    return total / len(inputs)


def distil_loss(student: Forward, teacher: Forward, rows: torch.Tensor, share: float) -> torch.Tensor:
    """Returns the loss of rows [B, T + 1] against the teacher's distributions and the text."""
    ids, labels = rows[:, :-1], rows[:, 1:].flatten()
    with torch.no_grad():
        wanted = teacher.states(ids).flatten(0, 1)
    heads = student.model.embed_tokens.weight, teacher.model.embed_tokens.weight
    return head_loss(student.states(ids).flatten(0, 1), heads[0], wanted, heads[1], labels, share)


@torch.no_grad()
def held_out_loss(student: Forward, tokens: Tokens, count: int) -> float:
    """Returns the mean cross-entropy of the first windows, one at a time."""
    total = 0.0
    for i in range(count):
        rows = torch.from_numpy(tokens.data[i * 7919 % 300 * tokens.num :][: tokens.num + 1].astype(np.int64))[None]
        logits = F.linear(student.states(rows[:, :-1]).float(), student.model.embed_tokens.weight)
        total += float(F.cross_entropy(logits[0], rows[0, 1:]))
    return total / count


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Returns the rate: warm-up, constant, then linear to zero over the last part; the same again for align steps."""
    if step < args.align_steps:
        return args.align_lr * min(1, (step + 1) / 20) * min(1, (args.align_steps - step) / (args.align_steps * 0.3))
    step, total = step - args.align_steps, args.steps - args.align_steps
    return args.lr * min(1, (step + 1) / 30) * min(1, (total - step) / (total * args.decay))


def flat_gradient(model: nn.Module) -> torch.Tensor:
    """Gives every parameter a view of one buffer as its gradient, and returns the buffer."""
    parameters = list(model.parameters())
    flat, start = torch.zeros(sum(p.numel() for p in parameters)), 0
    for p in parameters:
        p.grad = flat[start : start + p.numel()].view_as(p)
        start += p.numel()
    return flat


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Returns AdamW that decays matrices alone."""
    decayed = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def load_teacher() -> LlamaForCausalLM:
    """Returns pycode-16m in float32 without gradients."""
    return LlamaForCausalLM.from_pretrained(TEACHER, dtype=torch.float32).eval().requires_grad_(False)


def open_student(args: argparse.Namespace, teacher: LlamaForCausalLM) -> tuple[Qwen3_5ForCausalLM, dict | None]:
    """Returns the model and its checkpoint, where there is one."""
    torch.manual_seed(0)
    student = Qwen3_5ForCausalLM(make_config()).float()
    path = args.work / "checkpoint.pt"
    if path.is_file():
        checkpoint = torch.load(path, weights_only=True)
        student.load_state_dict(checkpoint["model"])
        return student, checkpoint
    init_from_teacher(student, teacher, Tokens(args.work / "train.bin", 512, 1).rows(0, 4)[:, :-1])
    return student, None


def run_worker(rank: int, args: argparse.Namespace) -> None:
    """Trains on every `workers`-th window; gradients are averaged after each step."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    store = f"tcp://127.0.0.1:{args.port}"
    dist.init_process_group("gloo", store, timedelta(hours=4), world_size=args.workers, rank=rank)
    teacher = load_teacher()
    student, checkpoint = open_student(args, teacher)
    flat, optimizer, first = flat_gradient(student), make_optimizer(student), 0
    if checkpoint is not None:
        optimizer.load_state_dict(checkpoint["optimizer"])
        first = checkpoint["step"]
    fast = [Forward(m, args.seq_len, torch.bfloat16) for m in (student, teacher)]
    train, held = (Tokens(args.work / f"{name}.bin", args.seq_len, 1) for name in ("train", "heldout"))
    saved = since = time.time()
    losses, counted = torch.zeros(()), 0
    for step in range(first, args.steps):
        aligning = step < args.align_steps
        for part in range(args.parts):
            rows = train.rows(((step * args.parts + part) * args.workers + rank) * args.batch, args.batch)
            loss = align_loss(*fast, rows[:, :-1]) if aligning else distil_loss(*fast, rows, args.share)
            (loss / (args.parts * args.workers)).backward()
            losses += loss.detach() / args.parts
        dist.all_reduce(flat)
        size = float(flat.norm())
        flat.mul_(min(1.0, 1.0 / size))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        optimizer.step()
        flat.zero_()
        done = step + 1
        counted += 1
        if rank == 0 and done % args.log_every == 0:
            rate = counted * args.parts * args.workers * args.batch * args.seq_len / (time.time() - since)
            print(f"step {done} loss {losses / counted:.4f} norm {size:.2f} {rate:.0f} tokens/s", flush=True)
            losses, counted, since = torch.zeros(()), 0, time.time()
        is_last = done in (args.steps, args.align_steps)
        if rank == 0 and (time.time() - saved > args.save_minutes * 60 or is_last):
            state = {"model": student.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
            torch.save(state, args.work / "checkpoint.tmp")
            (args.work / "checkpoint.tmp").replace(args.work / "checkpoint.pt")
            print(f"step {done} held out {held_out_loss(fast[0], held, 16):.4f}", flush=True)
            losses, counted, saved, since = torch.zeros(()), 0, time.time(), time.time()
    dist.destroy_process_group()


def train(args: argparse.Namespace) -> None:
    """Runs the workers."""
    multiprocessing.spawn(run_worker, (args,), args.workers)


@torch.no_grad()
def check(args: argparse.Namespace) -> None:
    """Compares both forwards with transformers' logits in float32.

    Raises:
        AssertionError: they differ by more than 1e-4.
    """
    teacher = load_teacher()
    student, _ = open_student(args, teacher)
    ids = Tokens(args.work / "heldout.bin", 256, 1).rows(0, 2)[:, :-1]
    for model in (student.eval(), teacher):
        states = Forward(model, 256, torch.float32).states(ids)
        found, wanted = F.linear(states, model.model.embed_tokens.weight), model(ids).logits
        labels = ids[:, 1:].flatten()
        loss = F.cross_entropy(wanted[:, :-1].flatten(0, 1), labels)
        print(f"{type(model).__name__}: largest difference {(found - wanted).abs().max():.2e}, loss {loss:.4f}")
        assert torch.allclose(found, wanted, atol=1e-4, rtol=1e-4)


def export(args: argparse.Namespace) -> None:
    """Writes the trained model as a transformers folder in bfloat16, with the teacher's tokenizer."""
    student, checkpoint = open_student(args, load_teacher())
    assert checkpoint is not None, "train first"
    student.to(torch.bfloat16).save_pretrained(args.out)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        (args.out / name).write_bytes((TEACHER / name).read_bytes())
    print(f"{args.out}: {student.num_parameters()} parameters after {checkpoint['step']} steps")


@torch.no_grad()
def measure(args: argparse.Namespace) -> None:
    """Prints figures of both models on held-out text, by transformers' own forward in float32, and greedy samples."""
    bytes_per_token = json.loads((args.work / "heldout.json").read_text())["bytes_per_token"]
    tokens, num = np.fromfile(args.work / "heldout.bin", dtype=np.uint16), 512
    for folder in (TEACHER, args.out):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        loss, hits = 0.0, 0
        for i in range(args.windows):
            start = i * ((len(tokens) - num - 1) // args.windows)
            ids = torch.from_numpy(tokens[start : start + num + 1].astype(np.int64))[None]
            logits = model(ids[:, :-1]).logits[0]
            loss += float(F.cross_entropy(logits, ids[0, 1:])) / args.windows
            hits += int((logits.argmax(-1) == ids[0, 1:]).sum())
        bits, top = loss / math.log(2) / bytes_per_token, hits / num / args.windows
        print(
            f"{folder.name}: loss {loss:.3f}, bits per byte {bits:.3f}, top-1 {top:.3f} ({args.windows * num} tokens)"
        )
    tokenizer = AutoTokenizer.from_pretrained(args.out)
    for text in ("def read_json(path):", "class Stack:\n    def __init__(self):", "import numpy as np"):
        ids = tokenizer(text, return_tensors="pt").input_ids
        print("---", tokenizer.decode(model.generate(ids, max_new_tokens=64, do_sample=False)[0]), sep="\n")


def main() -> None:
    """Runs one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("corpus", "check", "train", "export", "measure"))
    parser.add_argument("--work", type=Path, required=True, help="folder of token files and the checkpoint")
    parser.add_argument("--out", type=Path, default=TEACHER.with_name("pycode-hybrid"), help="folder of the model")
    parser.add_argument("--steps", type=int, default=805, help="in all, those of the alignment included")
    parser.add_argument("--align-steps", type=int, default=120)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--align-lr", type=float, default=3e-3)
    parser.add_argument("--decay", type=float, default=0.6, help="part of the steps over which the rate falls to zero")
    parser.add_argument("--share", type=float, default=0.6, help="of the teacher's distribution in the labels")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--parts", type=int, default=1, help="batches a worker and step")
    parser.add_argument("--batch", type=int, default=4, help="windows a batch")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--save-minutes", type=float, default=3.0)
    parser.add_argument("--port", type=int, default=29517)
    parser.add_argument("--windows", type=int, default=120, help="of 512 held-out tokens, to measure")
    parser.add_argument("--max-tokens", type=int, default=12_000_000)
    args = parser.parse_args()
    if args.command == "corpus":
        write_tokens(args.work, TEACHER / "tokenizer.json", args.max_tokens, 400_000)
    else:
        {"check": check, "train": train, "export": export, "measure": measure}[args.command](args)


if __name__ == "__main__":
    main()
