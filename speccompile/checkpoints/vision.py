# SPDX-License-Identifier: Apache-2.0
"""The vision tower of a multimodal checkpoint: its sizes, and how its images are prepared. Needs no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speccompile.checkpoints.checkpoint import read_config, stated_size
from speccompile.common.json_reader import finite_number, read_json_object, shown, whole_number
from speccompile.core.jobs import WeightCounts
from speccompile.errors import CheckpointError, RecipeError
from speccompile.graph_kinds.decoder import NUM_CHANNELS

# Multimodal types whose vision tower can be built: their images are blocks of tokens that see each other both ways.
VISION_TYPES = ("gemma3",)
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_DOWNLOAD = "Download the file again."
_MAX_ID = 2**31 - 1
# Sizes that files leave to transformers' Gemma3Config and SiglipVisionConfig.
_NUM_TOKENS, _IMAGE_SIZE, _PATCH_SIZE, _WIDTH, _INNER, _LAYERS = 256, 224, 16, 768, 3072, 12
_TOKEN_IDS = {"begin": ("boi_token_index", 255999), "image": ("image_token_index", 262144),
              "end": ("eoi_token_index", 256000)}  # fmt: skip
_MEAN = _STD = (0.5, 0.5, 0.5)
# Names of weights in the files, of several versions of transformers, and in our module. The pooling head is not used.
_NAME = re.compile(
    r"^(?:model\.)?(?:(vision_tower)\.(?!(?:vision_model\.)?head\.)(?:vision_model\.)?|(multi_modal_projector)\.)(.+)$"
)
_BILINEAR, _MAX_FILTER = 2, 5  # Pillow's numbers of its resampling filters


def own_name(name: str) -> str | None:
    """Returns the name that a weight of the files has in the vision graph's module; None for any other weight."""
    match = _NAME.match(name)
    return None if match is None else f"{'tower' if match[1] else 'projector'}.{match[3]}"


@dataclass(frozen=True)
class VisionDims:
    """Sizes of a vision tower with its projection."""

    image_size: int
    num_tokens: int
    hidden_size: int  # columns of a row, those of the target's embedding
    width: int
    inner_size: int
    num_layers: int
    patch_size: int
    num_params: int = 0  # parameters; 0 before the export

    def counts(self) -> WeightCounts:
        """Returns its weights, counted from these sizes."""
        linear = self.num_layers * (4 * self.width**2 + 2 * self.width * self.inner_size)
        linear += self.width * self.hidden_size
        patches = (self.image_size // self.patch_size) ** 2
        plain = self.width * (NUM_CHANNELS * self.patch_size**2 + patches)
        plain += self.num_layers * (9 * self.width + self.inner_size)
        return WeightCounts(linear + plain, linear, plain)


def check_vision(config: Mapping[str, Any]) -> None:
    """Refuses a target without a vision tower of `VISION_TYPES`. Raises RecipeError: it is one."""
    kind = config.get("model_type")
    if kind not in VISION_TYPES or not isinstance(config.get("vision_config"), Mapping):
        what = f"a checkpoint of type {shown(kind)}"
        got = what if kind not in VISION_TYPES else f"{what} without vision_config"
        todo = "Leave target.vision out: the language model is then built without images."
        raise RecipeError("target.vision", got, f"a multimodal checkpoint of type {' or '.join(VISION_TYPES)}", todo)


def read_vision_dims(source: Path, hidden_size: int) -> VisionDims:
    """Returns the sizes of the vision tower in `source`, of a type in `VISION_TYPES`, from its config.json.

    Raises:
        CheckpointError: a size is wrong, or the tokens of an image are no square of whole patches.
    """
    config = read_config(source)
    tower = config["vision_config"]

    def size(key: str, default: int) -> int:
        return stated_size(source, tower, key, default=default)

    num_tokens = stated_size(source, config, "mm_tokens_per_image", default=_NUM_TOKENS)
    dims = VisionDims(
        size("image_size", _IMAGE_SIZE),
        num_tokens,
        hidden_size,
        size("hidden_size", _WIDTH),
        size("intermediate_size", _INNER),
        size("num_hidden_layers", _LAYERS),
        size("patch_size", _PATCH_SIZE),
    )
    side, patches = math.isqrt(num_tokens), dims.image_size // dims.patch_size
    if side**2 != num_tokens or patches == 0 or patches % side:
        got = f"{num_tokens} tokens for an image of {patches} x {patches} patches"
        expected = "a square of tokens, each of as many whole patches"
        raise CheckpointError(str(source / "config.json"), got, expected, _DOWNLOAD)
    return dims


def image_record(source: Path, weights: str) -> dict[str, Any]:
    """Returns how images of the checkpoint in `source` are prepared: the JSON of a `manifest_records.ImageRecord`.

    Args:
        weights: "checkpoint" or "random"; with random weights the processor's file may be missing.

    Raises:
        CheckpointError: the processor's file is missing or wrong, or it cuts images into pieces (pan and scan).
    """
    config = read_config(source)
    dims = read_vision_dims(source, hidden_size=1)
    path, given = _read_processor(source, weights)
    _check_processor(path, given, dims.image_size)
    filters = whole_number(given.get("resample", _BILINEAR), 0, _MAX_FILTER)
    if filters is None:
        raise CheckpointError(f"{path} (resample)", shown(given["resample"]), "a filter of Pillow", _DOWNLOAD)
    return {
        "image_size": dims.image_size,
        "num_tokens": dims.num_tokens,
        **{f"{name}_token_id": _token_id(source, config, *row) for name, row in _TOKEN_IDS.items()},
        "resample": filters,
        "scale": _numbers(path, given, "rescale_factor", (1 / 255,))[0] if given.get("do_rescale", True) else 1.0,
        "mean": list(_numbers(path, given, "image_mean", _MEAN)) if given.get("do_normalize", True) else [0.0] * 3,
        "std": list(_numbers(path, given, "image_std", _STD)) if given.get("do_normalize", True) else [1.0] * 3,
    }


def _read_processor(source: Path, weights: str) -> tuple[Path, dict[str, Any]]:
    for path in (source / name for name in PROCESSOR_FILES):
        if path.is_file():
            data = read_json_object(path, CheckpointError, _DOWNLOAD)
            section = data.get("image_processor", data)
            if isinstance(section, dict) and "size" in section:
                return path, section
    path = source / PROCESSOR_FILES[0]
    if weights == "checkpoint":
        todo = "Download it with the weights, or save it with transformers: processor.save_pretrained(FOLDER)."
        raise CheckpointError(str(path), "no such file", "the settings of the image processor", todo)
    return path, {}


def _check_processor(path: Path, given: Mapping[str, Any], image_size: int) -> None:
    if given.get("do_pan_and_scan"):
        todo = "Set do_pan_and_scan to false: each image is then read once, whole."
        raise CheckpointError(f"{path} (do_pan_and_scan)", "true", "false or null: images are not cut", todo)
    size = given.get("size", {"height": image_size, "width": image_size})
    if size != {"height": image_size, "width": image_size} or given.get("do_resize") is False:
        got = shown(size) if given.get("do_resize", True) else "images that are not resized"
        expected = f"images of {image_size} x {image_size} pixels, the image_size of config.json"
        raise CheckpointError(f"{path} (size)", got, expected, _DOWNLOAD)


def _token_id(source: Path, config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key, config.get(key.replace("_index", "_id"), default))
    if (found := whole_number(value, 0, _MAX_ID)) is None:
        raise CheckpointError(f"{source / 'config.json'} ({key})", shown(value), "a token id", _DOWNLOAD)
    return found


def _numbers(path: Path, given: Mapping[str, Any], key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    value = default if given.get(key) is None else given[key]
    rows = value if isinstance(value, list | tuple) else [value]
    found = [finite_number(row) for row in rows]
    if len(found) != len(default) or None in found:
        raise CheckpointError(f"{path} ({key})", shown(value), f"{len(default)} numbers", _DOWNLOAD)
    return tuple(float(number) for number in found if number is not None)
