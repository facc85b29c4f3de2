# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters in PEFT's layout, and what they make of a model's weights. Needs no torch.

Tensors are named `base_model.model.MODULE.lora_A.weight` and the like. Merged, a weight W [out, in] becomes W + s * B A
in float32, with A [rank, in], B [out, rank] and s = alpha / rank (Hu et al. 2021, arXiv 2106.09685), or alpha /
sqrt(rank) with `use_rslora` (Kalajdzievski 2023, arXiv 2312.03732). With a magnitude vector m [out] (DoRA, Liu et al.
2024, arXiv 2402.09353) each row of it is scaled to the length m.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from speccompile.checkpoints.config_values import text_name
from speccompile.checkpoints.folders import HUB_ID, digests_from_checkpoint, resolve_checkpoint
from speccompile.checkpoints.packed_weights import numbers
from speccompile.checkpoints.safetensors import read_header
from speccompile.checkpoints.tensor_files import TensorFiles
from speccompile.common.json_reader import read_json_object, shown, whole_number
from speccompile.core.jobs import GraphJob
from speccompile.errors import CheckpointError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILES = (CONFIG, WEIGHTS)
CHANGE = "change.json"  # of joint training: what the adapter costs the target on held-out text
_PICKLE = "adapter_model.bin"
_PREFIX = "base_model.model."
_FLOATS = ("F16", "BF16", "F32")
_MAX_RANK = 1 << 16
_AGAIN = "Download the adapter again, or save it again with PEFT's save_pretrained."
_MERGE = "Merge it with PEFT (merge_and_unload, save_pretrained) and build the merged checkpoint."
# Keys that change no merged weight, or that are read below; any other one that is set is refused by its name.
_KNOWN = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_alpha", "lora_bias", "lora_dropout", "lora_ga_config",
    "megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern",
    "revision", "runtime_config", "target_modules", "task_type", "use_dora", "use_rslora",
}  # fmt: skip
# Ways to begin that leave the base model as it is; the others (PiSSA, OLoRA, CorDA, LoftQ ...) change it.
_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")
_PARTS = re.compile(
    r"^(?P<module>.+)\.(?P<part>lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A|lora_embedding_B"
    r"|lora_magnitude_vector(?:\.weight)?)$"
)
_OTHER_PARTS = re.compile(r"\.(lora_|ia3_|vera_|hada_|lokr_|oft_|boft_|token_adapter|trainable_tokens)")


@dataclass(frozen=True)
class LoraChange:
    """What an adapter adds to the weight of one module.

    Args:
        factors: keys of A [rank, in] and B [out, rank]; of an embedding A is [rank, vocab] and B [hidden, rank].
    """

    module: str
    rank: int
    scale: float
    factors: tuple[str, str]
    shape: tuple[int, int]  # [out, in] of the weight; [vocab, hidden] of an embedding
    is_embedding: bool
    magnitude: str | None = None  # key of DoRA's magnitudes; None: none
    bias: str | None = None  # key of a bias of B; None: none


class LoraAdapter:
    """An adapter whose config and tensors belong together; no tensor is read yet.

    Raises:
        CheckpointError: a damaged file, a kind of adapter that is not merged, or missing or wrong tensors.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = _read_config(folder)
        if not (folder / WEIGHTS).is_file():
            is_pickled = (folder / _PICKLE).is_file()
            todo = "Save it again with PEFT's save_pretrained, which writes safetensors." if is_pickled else _AGAIN
            raise CheckpointError(str(folder), _PICKLE if is_pickled else f"no {WEIGHTS}", WEIGHTS, todo)
        headers = read_header(folder / WEIGHTS)
        self._files = TensorFiles(headers, dict.fromkeys(headers, folder / WEIGHTS))
        self.changes: dict[str, LoraChange] = {}
        """By module."""
        self.replaced: dict[str, str] = {}
        """Keys of the parameters that are stored whole (modules_to_save, biases), by the parameter's name."""
        self._sort_tensors()

    @property
    def file(self) -> str:
        return str(self.folder / WEIGHTS)

    @property
    def target_modules(self) -> tuple[str, ...]:
        """Endings of the names of all modules that have factors; () where the config does not list them so."""
        named = self.config.get("target_modules")
        limits = (self.config.get(key) for key in ("layers_to_transform", "exclude_modules", "layers_pattern"))
        if not isinstance(named, list) or any(limit not in (None, [], "") for limit in limits):
            return ()
        return tuple(name for name in named if isinstance(name, str))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files.headers[self.replaced[name]].shape

    def array(self, key: str) -> np.ndarray:
        """Returns a tensor of the file in float32."""
        found = numbers(self._files.array(key), self._files.headers[key].dtype).astype(np.float32)
        if not np.isfinite(found).all():
            raise CheckpointError(f"{self.file} ({key})", "a number that is not finite", "finite weights", _AGAIN)
        return found

    def merge(self, change: LoraChange, weight: np.ndarray) -> None:
        """Changes the float32 weight of a module in place; beside it there is one array of its size."""
        a, b = (self.array(key) for key in change.factors)
        delta = (b @ a).T if change.is_embedding else b @ a
        delta = delta * np.float32(change.scale)
        weight += delta
        if change.magnitude is not None:
            lengths = np.sqrt(np.einsum("oi,oi->o", weight, weight, dtype=np.float64)).astype(np.float32)
            weight *= (self.array(change.magnitude).reshape(-1) / lengths)[:, None]

    def merge_table(self, name: str, table: np.ndarray) -> np.ndarray:
        """Returns a float32 weight [out, in] or [vocab, hidden] with the adapter; unchanged it is the same array."""
        if name in self.replaced:
            self.expect_shape(name, self.shape(name), table.shape)
            return self.array(self.replaced[name])
        change = self.changes.get(name.removesuffix(".weight"))
        if change is None:
            return table
        self.expect_shape(change.module, change.shape, table.shape)
        made = np.array(table)
        self.merge(change, made)
        return made

    def expect_shape(self, name: str, got: tuple[int, ...], expected: tuple[int, ...]) -> None:
        """Compares what is stored for a parameter with the model."""
        if tuple(got) != tuple(expected):
            base = self.config.get("base_model_name_or_path")
            todo = f"Build the model that the adapter was trained on ({shown(base)} by its config)."
            where, wanted = f"{self.file} ({name})", f"shape {list(expected)}, the target's"
            raise CheckpointError(where, f"shape {list(got)}", wanted, todo)

    def record(self, name: str) -> dict[str, Any]:
        """Returns what a manifest keeps of the adapter."""
        ranks = sorted({change.rank for change in self.changes.values()})
        digests = digests_from_lora(self.folder)
        counts = {"modules": len(self.changes), "replaced": len(self.replaced), "ranks": ranks}
        change = self.folder / CHANGE
        cost = {"change": read_json_object(change, CheckpointError, _AGAIN)} if change.is_file() else {}
        return {"model": name, **counts, "sha256": digests, **cost}

    def _sort_tensors(self) -> None:
        parts: dict[str, dict[str, str]] = {}
        for key, header in self._files.headers.items():
            where = f"{self.file} ({key})"
            if not key.startswith(_PREFIX):
                raise CheckpointError(where, "an unknown tensor", f"names that begin with {_PREFIX}", _AGAIN)
            if header.dtype not in _FLOATS:
                raise CheckpointError(where, header.dtype, "F32, F16 or BF16", _AGAIN)
            name = text_name(key.removeprefix(_PREFIX))
            if (match := _PARTS.match(name)) is not None:
                part = match["part"].removesuffix(".weight")
                parts.setdefault(match["module"], {})[part] = key
            elif _OTHER_PARTS.search(name) is not None or not name.endswith((".weight", ".bias")):
                raise CheckpointError(where, "an unknown tensor", "the tensors of LoRA or DoRA", _MERGE)
            else:
                self.replaced[name.replace(".base_layer.", ".")] = key
        for module, keys in sorted(parts.items()):
            self.changes[module] = self._change(module, keys)
        if not self.changes and not self.replaced:
            raise CheckpointError(self.file, "no tensors", "factors A and B of some modules", _AGAIN)

    def _change(self, module: str, keys: Mapping[str, str]) -> LoraChange:
        is_embedding = any(part.startswith("lora_embedding") for part in keys)
        names = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A", "lora_B")
        where, shapes = f"{self.file} ({module})", []
        for name in names:
            if name not in keys:
                raise CheckpointError(where, f"no {name}", "both factors, A and B", _AGAIN)
            shapes.append(self._files.headers[keys[name]].shape)
        config, (a, b) = self.config, shapes
        # Patterns may have the module's full name: PEFT's is that of the file, of a multimodal model another one.
        named = (module, keys[names[0]].removeprefix(_PREFIX).rpartition(f".{names[0]}")[0])
        rank = whole_number(_by_pattern(self.folder, config, "rank_pattern", named, config["r"]), 1, _MAX_RANK)
        alpha = _by_pattern(self.folder, config, "alpha_pattern", named, config["lora_alpha"])
        if len(a) != 2 or len(b) != 2 or a[0] != rank or b[1] != rank:
            got, expected = f"A {list(a)} and B {list(b)}", f"A [{rank}, in] and B [out, {rank}], as r is {rank}"
            raise CheckpointError(where, got, expected, "Use the config that was saved with the adapter.")
        if type(alpha) not in (int, float) or not math.isfinite(alpha):
            raise CheckpointError(str(self.folder / CONFIG), f"alpha {shown(alpha)}", "a number", _AGAIN)
        magnitude = keys.get("lora_magnitude_vector")
        if (magnitude is not None) != bool(config.get("use_dora")):
            got = "magnitudes" if magnitude is not None else "no magnitudes"
            raise CheckpointError(where, f"{got} with use_dora {shown(config.get('use_dora'))}", "both or none", _AGAIN)
        if magnitude is not None:
            if is_embedding:
                raise CheckpointError(where, "DoRA on an embedding", "DoRA on linear layers", _MERGE)
            size = self._files.headers[magnitude].size
            if size != b[0]:
                raise CheckpointError(where, f"{size} magnitudes", f"{b[0]}, one for each output", _AGAIN)
        bias = keys.get("lora_B.bias")
        if bias is not None and self._files.headers[bias].shape != (b[0],):
            got = f"a bias of shape {list(self._files.headers[bias].shape)}"
            raise CheckpointError(where, got, f"[{b[0]}], one for each output", _AGAIN)
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        shape = (a[1], b[0]) if is_embedding else (b[0], a[1])
        return LoraChange(module, rank, scale, (keys[names[0]], keys[names[1]]), shape, is_embedding, magnitude, bias)


def find_lora(name: str) -> Path:
    """Returns the folder of an adapter, downloaded if need be. Raises CheckpointError: neither folder nor hub id."""
    return resolve_checkpoint(name, FILES) if HUB_ID.fullmatch(name) else resolve_checkpoint(name)


def open_lora(name: str) -> LoraAdapter:
    return LoraAdapter(find_lora(name))


def digests_of_adapter(job: GraphJob) -> dict[str, str]:
    """Returns the SHA-256 by "lora/" and name of the files of a job's adapter; {} where it has none."""
    found = {} if job.lora is None else digests_from_lora(find_lora(job.lora))
    return {f"lora/{name}": digest for name, digest in found.items()}


def digests_from_lora(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of an adapter's files by name."""
    _read_config(folder)
    found = digests_from_checkpoint(folder, "checkpoint", (WEIGHTS,), CONFIG)
    return {name: found[name] for name in FILES if name in found}


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        is_model = (folder / "config.json").is_file()
        got = "a whole checkpoint" if is_model else f"no {CONFIG}"
        todo = "Give it as target.model, without target.lora." if is_model else "Give the folder that PEFT wrote."
        raise CheckpointError(str(folder), got, "an adapter in PEFT's layout", todo)
    config = read_json_object(path, CheckpointError, _AGAIN)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{path} (peft_type)", shown(kind), "'LORA'", _MERGE)
    for key, value in config.items():
        if key not in _KNOWN and value not in (None, False, [], {}):
            raise CheckpointError(f"{path} ({key})", shown(value), "an option that is merged, or none", _MERGE)
    begin = config.get("init_lora_weights", True)
    if not isinstance(begin, bool | str | None) or begin not in _BEGINNINGS:
        todo = "It changes the base model: save it as LoRA (path_initial_model_for_weight_conversion), or merge it."
        expected = "true, false or one of gaussian, eva, orthogonal"
        raise CheckpointError(f"{path} (init_lora_weights)", shown(begin), expected, todo)
    for key, fallback in (("r", 8), ("lora_alpha", 8)):
        config.setdefault(key, fallback)
    return config


def _by_pattern(folder: Path, config: Mapping[str, Any], key: str, named: Sequence[str], default: Any) -> Any:
    patterns = config.get(key) or {}
    where = f"{folder / CONFIG} ({key})"
    if not isinstance(patterns, dict):
        raise CheckpointError(where, shown(patterns), "an object: value by pattern", _AGAIN)
    for pattern, value in patterns.items():
        try:
            if any(re.match(rf"(.*\.)?({pattern})$", module) for module in named):
                return value
        except re.error as fault:
            raise CheckpointError(where, f"{shown(pattern)}: {fault}", "regular expressions", _AGAIN) from fault
    return default


_TODO = "Merge it into a bundle of its own (target.lora), or train the adapter without it."
_MERGED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
_ALONE = "a change of rank r of linear layers alone, chosen by request"


@dataclass(frozen=True)
class Factors:
    """Factors of all adapters for one linear; number 0 is no adapter."""

    a: np.ndarray  # [adapters + 1, rank, in] float32
    b: np.ndarray  # [adapters + 1, rank, out] float32, scaled
    file: str  # of the first adapter that has some, for messages


def open_adapters(job: GraphJob) -> tuple[LoraAdapter, ...]:
    """Opens the adapters of a job. Raises CheckpointError: one has more than low-rank changes of linears."""
    opened = tuple(open_lora(folder) for _, folder in job.adapters)
    for adapter in opened:
        _check_low_rank(adapter)
    return opened


def _check_low_rank(adapter: LoraAdapter) -> None:
    if adapter.config.get("fan_in_fan_out"):
        where = f"{adapter.folder / CONFIG} (fan_in_fan_out)"
        raise CheckpointError(where, "true", _ALONE, _TODO)
    if adapter.replaced:
        where = f"{adapter.file} ({next(iter(adapter.replaced))})"
        raise CheckpointError(where, "a whole parameter (modules_to_save, bias)", _ALONE, _TODO)
    for change in adapter.changes.values():
        kinds = {"DoRA": change.magnitude, "lora_bias": change.bias, "an embedding": change.is_embedding or None}
        got = next((kind for kind, value in kinds.items() if value is not None), None)
        if got is not None:
            raise CheckpointError(f"{adapter.file} ({change.module})", got, _ALONE, _TODO)


def stack_factors(adapters: Sequence[LoraAdapter]) -> dict[str, Factors]:
    """Returns the factors of all adapters by module; lower ranks end with zeros, and number 0 is zeros."""
    made: dict[str, Factors] = {}
    for module in sorted({name for adapter in adapters for name in adapter.changes}):
        held = [(number, one, one.changes[module]) for number, one in enumerate(adapters, 1) if module in one.changes]
        rank, (num_out, num_in) = max(change.rank for *_, change in held), held[0][2].shape
        a, b = (np.zeros((len(adapters) + 1, rank, width), np.float32) for width in (num_in, num_out))
        for number, adapter, change in held:
            adapter.expect_shape(module, change.shape, (num_out, num_in))
            first, second = (adapter.array(key) for key in change.factors)
            a[number, : change.rank], b[number, : change.rank] = first, np.float32(change.scale) * second.T
        made[module] = Factors(a, b, held[0][1].file)
    return made


def bytes_of_factors(job: GraphJob) -> int:
    """Predicts the float32 bytes of a job's factors in a graph; parts of a merged linear have ranks of their own."""
    adapters, merged = open_adapters(job), dict[str, list[tuple[int, int, int]]]()
    for module in {name for adapter in adapters for name in adapter.changes}:
        held = [adapter.changes[module] for adapter in adapters if module in adapter.changes]
        parent, _, end = module.rpartition(".")
        merged.setdefault(f"{parent}.{_MERGED.get(end, end)}", []).append((max(c.rank for c in held), *held[0].shape))
    sizes = (sum(rank for rank, *_ in rows) * (sum(out for _, out, _ in rows) + rows[0][2]) for rows in merged.values())
    return 4 * (len(adapters) + 1) * sum(sizes)


def digests_of_adapters(job: GraphJob) -> dict[str, str]:
    """Returns the SHA-256 of the adapters' files, by "adapters/", number and name."""
    found: dict[str, str] = {}
    for number, (_, folder) in enumerate(job.adapters, 1):
        digests = digests_from_lora(find_lora(folder))
        found |= {f"adapters/{number}/{name}": digest for name, digest in digests.items()}
    return found
