# SPDX-License-Identifier: Apache-2.0
"""Packed weights: what is read is what was packed, to the bit; what does not fit is refused by name."""

import json
import re
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from speccompile.checkpoints.checkpoint import check_checkpoint, count_params, list_tensors, read_dims
from speccompile.checkpoints.config_values import check_architecture
from speccompile.checkpoints.packed_weights import IntegerWeight, unpack_words
from speccompile.checkpoints.tensor_files import open_files
from speccompile.errors import CheckpointError, ExportError
from speccompile.export import attention
from speccompile.export.weights import load_model
from tests.checkpoints.packed_lab import CASES, words, write


@pytest.fixture
def our_attention() -> None:
    attention.register()


@pytest.mark.parametrize("case", CASES)
def test_every_value_survives(case, tmp_path):
    values = write(tmp_path, case)
    files = open_files(tmp_path)
    assert list_tensors(tmp_path) == files.headers
    assert files.headers.keys() == values.keys()
    for key, expected in values.items():
        got = files.tensor(key).float().numpy()
        assert got.shape == files.headers[key].shape
        np.testing.assert_array_equal(got, expected, err_msg=key)
    check_checkpoint(tmp_path, read_dims(tmp_path))
    assert count_params(tmp_path) == sum(value.size for value in values.values())


@pytest.mark.parametrize("case", CASES)
def test_integers_are_read_as_the_grid_of_the_same_numbers(case, tmp_path):
    write(tmp_path, case)
    files = open_files(tmp_path)
    grids = {key: grid for key in files.headers if (grid := files.grid(key)) is not None}
    assert set(grids) == set(files.grid_keys)
    assert bool(grids) == ("fp8" not in case)
    for key, grid in grids.items():
        weight = grid.weight()
        assert weight.shape == files.headers[key].shape and grid.levels.max() < 1 << grid.bits
        np.testing.assert_array_equal(weight.view(np.uint32), files.array(key).view(np.uint32), err_msg=key)
    has_order = any(grid.order is not None for grid in grids.values())
    assert has_order == ("ordered" in case)


def integers(bits: int, group: int, num_in: int = 96, *, zero: int | None = None, fine: bool = False) -> IntegerWeight:
    """Random integers; scales of float32 in full where they are fine, else of float16."""
    rng = np.random.default_rng(bits + group)
    shape = (7, -(-num_in // group))
    levels = rng.integers(0, 1 << bits, (7, num_in)).astype(np.uint8)
    levels[:, :2] = 0, (1 << bits) - 1
    zeros = rng.integers(0, 1 << bits, shape).astype(np.int32) if zero is None else np.full(shape, zero, np.int32)
    scales = rng.uniform(0.001, 0.1, shape).astype(np.float32 if fine else np.float16).astype(np.float32)
    return IntegerWeight(levels, zeros, scales, rng.permutation(np.arange(num_in) // group), bits)


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("group", [16, 32, 48, 64, 96, 1000])
@pytest.mark.parametrize(("bits", "zero"), [(2, 2), (4, 8), (4, 7), (4, 16), (4, None), (8, 128), (8, 127), (8, None)])
def test_a_grid_has_the_numbers_of_integers(bits, zero, group, fine):
    held = integers(bits, group, zero=zero, fine=fine)
    grid = held.grid()
    is_symmetric = zero in (2, 8, 128)
    if bits == 8 and fine and not is_symmetric:
        assert grid is None  # neither minimums nor differences of levels are exact
        return
    assert grid is not None
    np.testing.assert_array_equal(grid.weight(), held.weight())
    assert (grid.minimums is None) == (is_symmetric or fine)
    assert grid.group in (16, 32, 64, 96) and (group >= 96 or group % grid.group == 0)
    has_few_bits = (is_symmetric or zero == 16) and not fine  # -16 * scale has no more of them
    assert grid.scales.dtype == (np.float16 if has_few_bits else np.float32)


@pytest.mark.parametrize("fault", ["a group of 8", "groups of several sizes", "an infinite scale"])
def test_integers_that_have_no_grid(fault):
    held = integers(4, 8 if "8" in fault else 32)
    if "sizes" in fault:
        held.group_of[np.flatnonzero(held.group_of == 0)[0]] = 1
    elif "scale" in fault:
        held.scales[0, 0] = np.inf
    assert held.grid() is None


@pytest.mark.usefixtures("our_attention")
@pytest.mark.parametrize("case", CASES)
def test_a_packed_checkpoint_loads_as_the_plain_one(case, tmp_path):
    values = write(tmp_path, case)
    state = load_model(tmp_path, "checkpoint").state_dict()
    assert state.keys() >= values.keys()
    for key, expected in values.items():
        np.testing.assert_array_equal(state[key].numpy(), expected, err_msg=key)


@pytest.mark.usefixtures("our_attention")
def test_packed_experts_become_those_of_the_model(tmp_path):
    values = write(tmp_path, "compressed 4", moe=True)
    experts = load_model(tmp_path, "checkpoint").model.layers[1].mlp.experts
    for expert in range(4):
        prefix = f"model.layers.1.mlp.experts.{expert}"
        both = np.concatenate([values[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up")])
        np.testing.assert_array_equal(experts.gate_up_proj[expert].detach().numpy(), both)
        np.testing.assert_array_equal(experts.down_proj[expert].detach().numpy(), values[f"{prefix}.down_proj.weight"])


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_words_are_read_lowest_bits_first(bits):
    numbers = np.random.default_rng(bits).integers(0, 1 << bits, (3, 64))
    np.testing.assert_array_equal(unpack_words(words(numbers, bits).numpy(), bits), numbers)


COMPRESSED: dict[str, Any] = {"quant_method": "compressed-tensors"}


def rotated(*locations: str) -> dict[str, Any]:
    group = {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": location} for location in locations]}
    return COMPRESSED | {"transform_config": {"config_groups": {"R4": group}}}


@pytest.mark.parametrize(
    ("config", "got"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "many"}, "group_size 'many'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}},
            },
            "4 and 8 bits",
        ),
        (
            {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            "bitsandbytes; expected plain weights, or packed by gptq",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "ModelOpt (NVFP4)"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*mlp": {"bits": 8}}}, "dynamic, which quantises layers"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {".*mlp": {"bits": 8}}}, "('.*mlp')"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format True"),
        ({"quant_method": "gptq", "bits": 4, "adapter": {"path": "eora"}}, "adapter "),
        (rotated("input"), "applied to 'input', at every step"),
        (rotated("weight_input", "k_cache"), "applied to 'k_cache'"),
        (rotated("q_attn"), "applied to 'q_attn'"),
        (COMPRESSED | {"transform_config": {"version": 2, "fused": True}}, "transform_config.version 2"),
        (COMPRESSED | {"config_groups": {"a": {"weights": {"scale_shift": 1}}}}, "weights.scale_shift 1"),
        (COMPRESSED | {"config_groups": {"a": {"format": "nvfp4-pack-quantized"}}}, "nvfp4-pack-quantized"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        (COMPRESSED | {"rotation": "hadamard"}, "rotation 'hadamard'"),
    ],
)
def test_what_is_not_read_is_refused_by_name(config, got, tmp_path):
    write(tmp_path, "awq")
    held = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(held))
    with pytest.raises(CheckpointError, match=re.escape(got)):
        list_tensors(tmp_path)


def test_modelopt_says_it_in_a_file_of_its_own(tmp_path):
    write(tmp_path, "fp8 blocks")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    held = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(held))
    with pytest.raises(CheckpointError, match=r"weights quantised by ModelOpt \(FP8\)"):
        list_tensors(tmp_path)
    held["quantization"] = {"quant_algo": None}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(held))
    assert list_tensors(tmp_path)


def test_an_unknown_method_is_an_architecture_that_is_not_exported():
    with pytest.raises(ExportError, match="bitsandbytes"):
        check_architecture({"model_type": "llama", "quantization_config": {"quant_method": "bitsandbytes"}})
    check_architecture({"model_type": "llama", "quantization_config": {"quant_method": "awq"}})


@pytest.mark.parametrize(
    ("case", "part", "change", "got"),
    [
        ("gptq 4", "scales", None, "no such tensor"),
        ("gptq 4", "qzeros", lambda t: t[:, :-1], r"shape \[3, 7\]"),
        ("gptq 4 ordered", "g_idx", lambda t: t + 1, "group 4"),
        ("awq", "qzeros", lambda t: t[:-1], r"shape \[2, 8\]"),
        ("compressed 4", "weight_shape", lambda t: t + 1, r"shape \[49, 65\]"),
        ("compressed 4", "weight_scale", lambda t: t[:, :2], "2 groups of 64 columns"),
        ("compressed int8", "weight_scale", lambda t: t[:7], r"shape \[7, 1\]"),
        ("fp8 blocks", "weight_scale_inv", lambda t: t.double(), "F64"),
    ],
)
def test_a_part_that_does_not_fit_is_named(case, part, change, got, tmp_path):
    write(tmp_path, case)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    key = f"model.layers.0.self_attn.{'q' if part == 'qzeros' else 'o'}_proj.{part}"
    if change is None:
        del stored[key]
    else:
        stored[key] = change(stored[key]).contiguous()
    save_file(stored, path, {"format": "pt"})

    def read() -> np.ndarray:
        return open_files(tmp_path).array(key.rpartition(".")[0] + ".weight")

    with pytest.raises(CheckpointError, match=got) as caught:
        read()
    assert "self_attn" in caught.value.where
