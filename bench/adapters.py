# SPDX-License-Identifier: Apache-2.0
"""Milliseconds of a step, and tokens/s of plain decoding, with LoRA adapters that requests choose, beside none.

    python bench/adapters.py MODEL FOLDER [--num 16] [--rank 8] [--modules q_proj,v_proj] [--threads 1] [--cpu-time]

Builds two bundles of MODEL in FOLDER, unless they are there: one with random adapters, one without. Ways take turns
within a round; medians over the rounds are printed, and each one's share of the speed without adapters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

import speccompile
from speccompile import SamplingParams
from speccompile.checkpoints.checkpoint import read_dims
from speccompile.core.specs import ADAPTER, LENGTHS, TOKENS
from speccompile.export import attention
from speccompile.export.weights import load_model
from speccompile.export.wrapper import find_layers
from speccompile.pipeline import build
from speccompile.recipe import find_device, load_recipe, resolve
from speccompile.runtime.spec_engine import SpecEngine

LENGTH, NEW_TOKENS = 64, 32
ALL = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"


def write_adapters(model: str, folder: Path, num: int, rank: int, modules: tuple[str, ...]) -> dict[str, str]:
    """Writes random adapters, small enough to leave texts readable; returns their folders by name."""
    source = Path(model)
    attention.register()
    loaded = load_model(source, "checkpoint")
    layers = {id(m) for layer in find_layers(loaded, read_dims(source).num_layers) for m in layer.modules()}
    linears = {n: m for n, m in loaded.named_modules() if id(m) in layers and n.rpartition(".")[2] in modules}
    found = {}
    for number in range(num):
        generator, tensors = torch.Generator().manual_seed(number), {}
        for name, linear in linears.items():
            for side, shape in (("A", (rank, linear.in_features)), ("B", (linear.out_features, rank))):
                tensors[f"base_model.model.{name}.lora_{side}.weight"] = torch.randn(shape, generator=generator) * 0.02
        dest = folder / f"adapter-{number}"
        dest.mkdir(parents=True, exist_ok=True)
        save_file(tensors, dest / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(modules)}
        (dest / "adapter_config.json").write_text(json.dumps(config))
        found[f"a{number:03}"] = str(dest.resolve())
    return found


def open_bundles(args: argparse.Namespace) -> dict[str, SpecEngine]:
    engines = {}
    for way in ("without", "with"):
        dest = args.folder / way
        if not (dest / "manifest.json").is_file():
            adapters = {}
            if way == "with":
                modules = tuple(args.modules.split(","))
                adapters = write_adapters(args.model, args.folder, args.num, args.rank, modules)
            target = {"model": str(Path(args.model).resolve()), "adapters": adapters}
            engine = {"max_batch_size": args.batch, "max_seq_len": 256, "threads": args.threads, "max_draft_nodes": 16}
            path = args.folder / f"{way}.json"
            path.write_text(json.dumps({"target": target, "engine": engine}))
            build(resolve(load_recipe(path, args.set), find_device("cpu")), dest)
        engines[way] = speccompile.load(dest, threads=args.threads)
    return engines


def ways_of(engines: dict[str, SpecEngine], batch: int) -> dict[str, tuple[SpecEngine, np.ndarray]]:
    """Returns the engine and the adapters' numbers of all slots, by way."""
    num = len(engines["with"].adapters)
    return {
        "without": (engines["without"], np.zeros(batch, np.int64)),
        "none chosen": (engines["with"], np.zeros(batch, np.int64)),
        "one": (engines["with"], np.ones(batch, np.int64)),
        f"{num} mixed": (engines["with"], 1 + np.arange(batch) % num),
    }


def step_ms(engine: SpecEngine, chosen: np.ndarray, nodes: int, clock: Callable[[], float]) -> float:
    target, batch = engine.verifier.engine, len(chosen)
    tokens = np.random.default_rng(0).integers(0, target.spec.vocab_size, (batch, nodes))
    feeds = {TOKENS: tokens, LENGTHS: np.full(batch, LENGTH)} | ({ADAPTER: chosen} if chosen.any() else {})
    start = clock()
    target.run(feeds)
    return (clock() - start) * 1e3


def tokens_per_s(engine: SpecEngine, chosen: np.ndarray, clock: Callable[[], float]) -> float:
    prompts = [[5 + i + j for j in range(24)] for i in range(len(chosen))]
    fields = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    params = [SamplingParams(adapter=engine.adapters[i - 1] if i else "", **fields) for i in chosen.tolist()]
    start = clock()
    made = engine.generate(prompts, params, speculative=False)
    return sum(len(one.tokens) for one in made) / (clock() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num", type=int, default=16)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--modules", default=ALL)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--nodes", default="1,5")
    parser.add_argument("--set", nargs="*", default=[])
    parser.add_argument("--cpu-time", action="store_true", help="of this process, which waiting for a CPU leaves out")
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    args.folder.mkdir(parents=True, exist_ok=True)
    ways = ways_of(open_bundles(args), args.batch)
    columns = [*(f"step of {nodes}, ms" for nodes in args.nodes.split(",")), "tokens/s"]
    found: dict[tuple[str, str], list[float]] = {(way, column): [] for way in ways for column in columns}
    end = time.monotonic() + args.seconds
    while time.monotonic() < end:
        for way, (engine, chosen) in ways.items():
            for nodes, column in zip(args.nodes.split(","), columns, strict=False):
                found[way, column] += [step_ms(engine, chosen, int(nodes), clock) for _ in range(6)][1:]
            found[way, "tokens/s"].append(tokens_per_s(engine, chosen, clock))
    medians = {key: statistics.median(values) for key, values in found.items()}
    print(f"{'':14}" + "".join(f"{column:>24}" for column in columns))
    for way in ways:
        cells = []
        for column in columns:
            value, base = medians[way, column], medians["without", column]
            cells.append(f"{value:.2f} ({value / base if column == 'tokens/s' else base / value:.3f})")
        print(f"{way:14}" + "".join(f"{cell:>24}" for cell in cells))


if __name__ == "__main__":
    main()
