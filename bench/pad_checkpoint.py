#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Widen the MLPs of a Llama or Qwen3.5 checkpoint with neurons that compute nothing.

The added gate, up and down weights are zero, so every added neuron contributes silu(0) * 0 * 0 = 0: the
padded model is the same function at the cost of a larger one. A trained pair keeps its real acceptance
while its target costs what a target of that many parameters costs. A figure taken so is called "padded"
wherever it is shown. The module of multi-token prediction inside a checkpoint grows along, as config.json has one
width for both, and does not count.

    python bench/pad_checkpoint.py SOURCE DEST --params 110e6

--float32 stores float32 weights that no 16-bit form holds: all matrices are 1 + 2^-12 times as large. So a checkpoint
stored in bfloat16 shows what one that needs float32 costs.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FACTOR = 1 + 2**-12  # of a number of bfloat16, 8 bits long, makes one that needs 20
MODULE = "mtp."
INNER_MULTIPLE = 64  # a width that every kernel's block size divides


def read_tensors(source: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of the safetensors files in `source`."""
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise SystemExit(f"{source}: holds no *.safetensors file; give the folder of a checkpoint")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def num_of_model(tensors: Mapping[str, torch.Tensor]) -> int:
    """Returns the number of parameters, without those of a module of multi-token prediction."""
    return sum(tensor.numel() for name, tensor in tensors.items() if not name.startswith(MODULE))


def num_extra_neurons(config: Mapping[str, Any], num_params: int, wanted: float) -> int:
    """Returns the number of neurons to add to every layer's MLP to come near `wanted` parameters from below.

    Raises:
        SystemExit: the model is not smaller than `wanted` by one multiple of neurons a layer.
    """
    params_per_neuron = 3 * config["hidden_size"] * config["num_hidden_layers"]
    extra = int((wanted - num_params) / params_per_neuron) // INNER_MULTIPLE * INNER_MULTIPLE
    if extra <= 0:
        least = num_params + INNER_MULTIPLE * params_per_neuron
        raise SystemExit(f"--params {wanted:.0f}: the model has {num_params} already; ask for {least} or more")
    return extra


def pad_tensors(tensors: Mapping[str, torch.Tensor], extra: int) -> dict[str, torch.Tensor]:
    """Returns `tensors` with `extra` zero neurons in every MLP.

    gate_proj and up_proj [inner, hidden] grow by rows, down_proj [hidden, inner] by columns; dtypes are kept.
    """
    padded = dict(tensors)
    for name, weight in tensors.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            padded[name] = torch.cat([weight, weight.new_zeros(extra, weight.shape[1])])
        elif name.endswith("down_proj.weight"):
            padded[name] = torch.cat([weight, weight.new_zeros(weight.shape[0], extra)], dim=1)
    return padded


def widen_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns `tensors` in float32; matrices need it."""
    widened = {name: weight.float() for name, weight in tensors.items()}
    return {name: weight * FACTOR if weight.ndim == 2 else weight for name, weight in widened.items()}


def pad_checkpoint(source: Path, dest: Path, wanted: float | None, is_float32: bool = False) -> tuple[int, int]:
    """Write the padded copy of `source` to `dest`, a folder that must not exist.

    Args:
        source: folder of the checkpoint.
        dest: folder to write.
        wanted: number of parameters to reach; None: as many as there are.
        is_float32: see `widen_tensors`.

    Returns:
        Numbers of parameters before and after, see `num_of_model`.
    """
    config = json.loads((source / "config.json").read_text())
    tensors = read_tensors(source)
    num_before = num_of_model(tensors)
    extra = 0 if wanted is None else num_extra_neurons(config, num_before, wanted)
    padded = pad_tensors(tensors, extra)
    config["intermediate_size"] += extra
    if is_float32:
        padded = widen_tensors(padded)
        config.pop("torch_dtype", None)
        config["dtype"] = "float32"

    dest.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and not file.name.endswith(".safetensors.index.json"):
            shutil.copy(file, dest)
    (dest / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(padded, dest / "model.safetensors", metadata={"format": "pt"})
    return num_before, num_of_model(padded)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder of a checkpoint in safetensors")
    parser.add_argument("dest", type=Path, help="folder to write; must not exist")
    parser.add_argument("--params", type=float, help="number of parameters to reach")
    parser.add_argument("--float32", action="store_true", help="store weights that need float32")
    args = parser.parse_args(argv)
    if args.params is None and not args.float32:
        parser.error("got neither --params nor --float32; expected at least one of them")
    before, after = pad_checkpoint(args.source, args.dest, args.params, args.float32)
    print(f"{args.dest}: {before} -> {after} parameters (padded)")


if __name__ == "__main__":
    main()
