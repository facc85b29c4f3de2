# SPDX-License-Identifier: Apache-2.0
"""A module under training: the one module run again and again on its own output, over a frozen target.

After Cai et al. 2025, "FastMTP" (arXiv 2509.18362): teacher-forced tokens, later drafts weigh less (the recipe's
`decay`, 0.6 there). A chain's rows are its own, and those before its start are of the first run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from speccompile.checkpoints.checkpoint import read_config
from speccompile.checkpoints.config_values import extra_keys
from speccompile.checkpoints.tensor_files import TensorFiles, files_from_tensors, open_files
from speccompile.doctor.convert import write_safetensors
from speccompile.doctor.doctor import read_speculator
from speccompile.export.chains import IMPLEMENTATION, drawn_chains, greedy_chain, register
from speccompile.export.heads_file import CONFIG, WEIGHTS, write_heads
from speccompile.speculators.mtp.checkpoint import FORMATS, PREFIX, SCOPE, config_of_layer
from speccompile.speculators.mtp.config import MtpTraining
from speccompile.speculators.mtp.model import MtpModule, fitted_weights, is_norm, stored_offset
from speccompile.training_contract import Drafted, TargetNeeds, TargetParts, TrainingBatch


class TrainableMtp(nn.Module):
    """A `speccompile.training_contract.Trainable`. `parts`: the target's embeddings, LM head and folder."""

    def __init__(self, module: MtpModule, config: Mapping[str, Any], parts: TargetParts, training: MtpTraining) -> None:
        super().__init__()
        self.module, self.config, self.num_positions = module, dict(config), training.unrolled_steps
        self.starts, self.into = training.starts, parts.folder if training.into_target else None
        self.rotary = module.make_rotary()
        self.register_buffer("embeddings", parts.embeddings, persistent=False)
        self.register_buffer("lm_head", parts.lm_head, persistent=False)

    def _advance(self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.module.read(self.embeddings[tokens], hidden, self.rotary(hidden, positions))

    def forward(self, batch: TrainingBatch) -> Drafted:
        """Returns the drafts; a chain that starts at t reads states up to t and tokens up to t + 1, the root."""
        num, hidden = self.num_positions, batch.hidden[:, :-1].float()
        own, labels = drawn_chains(
            self._advance, batch.tokens, hidden, num, self.starts, batch.seed, is_label=batch.is_label
        )
        return Drafted(self.module.finish(own), labels, (self.lm_head,) * num)

    def draft(self, batch: TrainingBatch, num: int) -> torch.Tensor:
        """Returns a chain: reads all states of the target, then drafts on its own output."""
        return greedy_chain(self._advance, self._best, batch.tokens, batch.hidden.float(), num)

    def _best(self, own: torch.Tensor) -> torch.Tensor:
        return (self.module.finish(own) @ self.lm_head.T).argmax(-1)

    def save(self, folder: Path) -> None:
        """Writes the `mtp.*` layout: the module alone, or the target's files with the module inside."""
        shift = self.module.class_offset - stored_offset(self.config)
        state = self.module.state_dict()
        tensors = {PREFIX + name: tensor + shift if is_norm(name) else tensor for name, tensor in state.items()}
        if self.into is None:
            write_heads(folder, self.config, tensors)
        else:
            _write_whole(self.into, folder, tensors)


def _write_whole(source: Path, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    config = read_config(source)
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    text["mtp_num_hidden_layers"] = 1
    model, module = open_files(source), files_from_tensors({n: t.detach().bfloat16() for n, t in tensors.items()})
    old = extra_keys(model.headers, int(text["num_hidden_layers"]))
    for path in sorted(source.iterdir()):
        is_weights = path.name.endswith((".safetensors", ".safetensors.index.json", ".gguf"))
        if path.is_file() and not is_weights and not path.name.startswith("."):
            shutil.copyfile(path, folder / path.name)
    write_safetensors(folder / WEIGHTS, _Joined(model, module, old))
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class _Joined(TensorFiles):
    """The tensors of a model, some left out, and those of a module."""

    def __init__(self, model: TensorFiles, module: TensorFiles, left_out: set[str]) -> None:
        kept = {key: header for key, header in model.headers.items() if key not in left_out}
        super().__init__({**kept, **module.headers}, model.files)
        self._model, self._module = model, module

    def array(self, key: str) -> Any:
        return (self._module if key in self._module.headers else self._model).array(key)


def begin_module(config: Mapping[str, Any], parts: TargetParts) -> MtpModule:
    """Returns a module that begins as the target's last layer of its kind, on the target's hidden states."""
    with torch.device("meta"):
        module = MtpModule(config, IMPLEMENTATION)
    module.to_empty(device="cpu")
    ones = 1.0 - module.class_offset
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.fill_(ones if is_norm(name) else 0.0) if parameter.dim() == 1 else parameter.normal_(0, 0.02)
        for buffer in module.buffers():
            buffer.zero_()
        width = module.fc.out_features
        hidden = slice(0, width) if module.is_hidden_first else slice(width, 2 * width)
        module.fc.weight[:, hidden] = torch.eye(width)
        if parts.norm is not None and parts.norm.shape == module.norm.weight.shape:
            module.norm.weight.copy_(parts.norm)
        own = dict(module.layers[0].named_parameters())
        shapes = {name: parameter.shape for name, parameter in own.items()}
        for layer in reversed(parts.layers):
            if {name: value.shape for name, value in layer.items()} == shapes:
                for name, parameter in own.items():
                    parameter.copy_(layer[name])
                break
    return module


class MtpTrainer:
    """A `speccompile.training_contract.Trainer`."""

    def needs(self, config: MtpTraining, target: Mapping[str, Any]) -> TargetNeeds:
        return TargetNeeds(hidden=True)

    def make(self, config: MtpTraining, parts: TargetParts, start: Path | None) -> Any:
        """Returns a module like the target's last layer, or that of the checkpoint `start`."""
        register()
        made = config_of_layer(parts.config)
        if start is None:
            return TrainableMtp(begin_module(made, parts), made, parts, config)
        stated, weights = read_speculator(start, FORMATS)
        made |= {name: value for name, value in stated.items() if name != SCOPE}
        module = begin_module(made, parts)
        module.load_state_dict(fitted_weights(str(start), module, made, weights))
        return TrainableMtp(module, made, parts, config)
