# SPDX-License-Identifier: Apache-2.0
"""One process or many: started by torchrun, parameters, gradients and AdamW's state are sharded (FSDP)."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=False)


@dataclass(frozen=True)
class Team:
    """The processes of a run."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def shard(self, module: nn.Module) -> nn.Module:
        """Splits the parameters of `module` over the processes in place and returns it; one process keeps it whole."""
        if self.size > 1:
            fully_shard(module, mesh=init_device_mesh(self.device, (self.size,)), reshard_after_forward=False)
        return module

    def total(self, sums: torch.Tensor) -> torch.Tensor:
        if self.size > 1:
            distributed.all_reduce(sums)
        return sums

    def wait(self) -> None:
        if self.size > 1:
            distributed.barrier()

    def part(self, rows: list[int]) -> list[int]:
        return rows[self.rank :: self.size]

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        """Returns the whole state_dict, on the CPU; every process must call it."""
        return dict(get_model_state_dict(module, options=_WHOLE)) if self.size > 1 else module.state_dict()

    def optimizer_state(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if self.size > 1:
            return dict(get_optimizer_state_dict(module, optimizer, options=_WHOLE))
        return optimizer.state_dict()

    def load(self, module: nn.Module, optimizer: Any, model_state: Any, optimizer_state: Any) -> None:
        """Loads what `model_state` and `optimizer_state` returned; `optimizer` None leaves the second out."""
        if self.size == 1:
            module.load_state_dict(model_state)
            if optimizer is not None:
                optimizer.load_state_dict(optimizer_state)
            return
        set_model_state_dict(module, model_state, options=_WHOLE)
        if optimizer is not None:
            set_optimizer_state_dict(module, optimizer, optimizer_state, options=_WHOLE)


@contextmanager
def join_team(device: str) -> Iterator[Team]:
    """Yields the team of torchrun's environment, or a team of one."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Team(device=device)
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield Team(distributed.get_rank(), size, device)
    finally:
        gc.collect()  # sharded modules are in cycles, and hold process groups
        distributed.destroy_process_group()
