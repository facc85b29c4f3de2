# SPDX-License-Identifier: Apache-2.0
"""The frozen target: one forward over windows of text gives the outputs that trainables read."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import torch

from speccompile.checkpoints.checkpoint import check_checkpoint, read_dims, read_text_config
from speccompile.checkpoints.lora import open_lora
from speccompile.checkpoints.model_config import read_model_config
from speccompile.errors import CheckpointError
from speccompile.export.lora import merge_lora
from speccompile.export.weights import read_weights
from speccompile.export.wrapper import find_layers
from speccompile.training_contract import TargetNeeds, TargetParts

KEPT_PROBS = 16  # most probable tokens of a distribution that are kept; the example target's hold 0.96 of its mass
_DIST_ROWS = 4096


class Target:
    """A causal language model in evaluation mode, with the adapter `lora` merged into float32 weights, if any."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: str = "cpu", lora: str | None = None) -> None:
        self.folder, self.dims, self.config = folder, read_dims(folder), read_text_config(folder)
        check_checkpoint(folder, self.dims)
        self.device, self.form = device, "weights"
        try:
            self.model, _ = read_weights(folder, read_model_config(folder), dtype)
        except (OSError, ValueError) as fault:
            got = str(fault).strip().splitlines()[0]
            raise CheckpointError(str(folder), got, "a causal language model", "Check the folder.") from fault
        if lora is not None:
            merge_lora(self.model, open_lora(lora))
        self.model.eval().requires_grad_(False).to(device)

    def parts(self, token_counts: torch.Tensor) -> TargetParts:
        """Returns the parts that a trainable may start from, in float32, on the CPU."""
        norm: Any = getattr(self.model.base_model, "norm", None)
        head = self.model.get_output_embeddings()
        embeddings = self.model.get_input_embeddings()
        assert head is not None and embeddings is not None
        is_rms = "RMSNorm" in type(norm).__name__
        return TargetParts(
            config=self.config,
            folder=self.folder,
            embeddings=_plain(embeddings.weight),
            lm_head=_plain(head.weight),
            token_counts=token_counts,
            norm=_plain(norm.weight) if is_rms else None,
            layers=tuple(
                {name: _plain(value) for name, value in layer.named_parameters()}
                for layer in find_layers(self.model, self.dims.num_layers)
            ),
        )

    @torch.no_grad()
    def run(self, tokens: torch.Tensor, needs: TargetNeeds) -> dict[str, torch.Tensor]:
        """Returns the outputs of tokens [batch, nodes] int64 in `needs`, and the distributions: `TrainingBatch`."""
        held = self.outputs(tokens, needs)
        return held | dist_from_logits(held.pop("logits"))

    def outputs(self, tokens: torch.Tensor, needs: TargetNeeds) -> dict[str, torch.Tensor]:
        """Returns the outputs in `needs`, and `logits` [batch, nodes, vocab]; gradients flow where they are enabled."""
        held: dict[str, torch.Tensor] = {}
        head = self.model.get_output_embeddings()
        layers = find_layers(self.model, self.dims.num_layers)
        hooks = [head.register_forward_pre_hook(lambda _, args: held.update(hidden=args[0]))]
        hooks += [layers[i].register_forward_hook(_keep(held, f"layer.{i}")) for i in needs.layers]
        try:
            out = self.model(input_ids=tokens.to(self.device), use_cache=needs.caches)
        finally:
            for hook in hooks:
                hook.remove()
        if needs.caches:
            last = out.past_key_values.layers[self.dims.num_layers - 1]
            held |= {"k_cache": last.keys, "v_cache": last.values}
        if not needs.hidden:
            held.pop("hidden")
        return {**held, "logits": out.logits}


def dist_from_logits(logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the most probable tokens of each distribution, best first: `dist_tokens` int64, `dist_probs` float32."""
    tokens, probs = [], []
    for rows in logits.flatten(0, -2).split(_DIST_ROWS):  # float32 logits of all rows are gigabytes
        best = rows.topk(min(KEPT_PROBS, rows.shape[-1]), dim=-1)
        mass = torch.logsumexp(rows.float(), -1, keepdim=True)
        tokens.append(best.indices)
        probs.append((best.values.float() - mass).exp())
    shape = logits.shape[:-1]
    return {"dist_tokens": torch.cat(tokens).unflatten(0, shape), "dist_probs": torch.cat(probs).unflatten(0, shape)}


def _plain(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().float().cpu()


def _keep(held: dict[str, torch.Tensor], name: str) -> Any:
    def keep(module: torch.nn.Module, args: Any, output: Any) -> None:
        held[name] = output[0] if isinstance(output, tuple) else output

    return keep


def keep_pages() -> None:
    """Makes malloc keep freed memory: on Linux every large tensor is otherwise mapped, zeroed and unmapped anew.

    Page faults took 15 times the arithmetic of a forward of a 16-million-parameter target on a virtual machine.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
            libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD
