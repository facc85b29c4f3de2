# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with absurd counts, wrong types and deep nesting: refused at once, by key and value."""

import json
import struct
import time

import pytest

from speccompile.checkpoints.checkpoint import read_config, read_dims
from speccompile.checkpoints.safetensors import read_header
from speccompile.doctor.doctor import examine
from speccompile.errors import CheckpointError
from speccompile.recipe.predict import predict
from tests.checkpoints import checkpoint_lab as lab

COUNTS = (257, 1_000_000, 2**31, 2**62, 10**30)
AT_ONCE_S = 5.0  # of a busy machine; before, n_predict 1000000 took more than 60 s


@pytest.mark.parametrize("num", COUNTS)
@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lab.mlp_plain, "n_predict"),
        (lab.mlp_tied, "n_predict"),
        (lab.medusa_ours, "medusa_num_heads"),
        (lab.medusa_ours, "medusa_num_layers"),
        (lab.eagle_ours, "num_hidden_layers"),
        (lab.eagle3_ours, "num_hidden_layers"),
        (lab.glide_ours, "num_hidden_layers"),
    ],
)
def test_a_count_beyond_what_the_files_hold_is_a_finding_at_once(tmp_path, make, key, num):
    folder = make(tmp_path / "s")
    lab.set_config(folder, **{key: num})
    start = time.perf_counter()
    report = examine(str(folder))
    assert time.perf_counter() - start < AT_ONCE_S
    assert report.errors
    assert any(key in f.where and f.got == str(num) for f in report.errors) or num == 257


@pytest.mark.parametrize("number", [10**9, 10**18, 10**40])
def test_a_key_with_an_absurd_number_is_reported_as_unknown(tmp_path, number):
    folder = lab.medusa_ours(tmp_path / "s")
    lab.edit(
        folder, lambda tensors: tensors.update({f"{number}.0.linear.weight": tensors["0.0.linear.weight"].clone()})
    )
    report = examine(str(folder))
    assert any(str(number) in f.where and "does not have" in f.got for f in report.errors)


def test_counts_whose_product_is_absurd_are_refused(tmp_path):
    """Each is no more than the files hold keys, together they would make a million."""
    folder = lab.medusa_ours(tmp_path / "s")
    lab.edit(
        folder, lambda tensors: tensors.update({f"x{i}": tensors["0.0.linear.bias"][:1].clone() for i in range(1_000)})
    )
    lab.set_config(folder, medusa_num_heads=1_000, medusa_num_layers=1_000)
    start = time.perf_counter()
    assert examine(str(folder)).errors
    assert time.perf_counter() - start < 2 * AT_ONCE_S


@pytest.mark.parametrize("key", ["head_dim", "num_key_value_heads", "num_hidden_layers", "vocab_size", "model_type"])
@pytest.mark.parametrize("value", ["x", float("nan"), float("inf"), -1, 2**31, 10**40, 1.5, [], {"a": 1}, True])
def test_a_size_of_another_type_is_refused_by_key(tmp_path, key, value):
    if key == "model_type" and value == "x":
        value = 1
    folder = lab.write_target(tmp_path / "t", **{key: value})
    with pytest.raises(CheckpointError) as caught:
        read_dims(folder)
    assert key in caught.value.where + caught.value.expected
    assert caught.value.got == repr(value)


@pytest.mark.parametrize("key", ["intermediate_size", "num_local_experts"])
@pytest.mark.parametrize("value", ["x", float("inf"), [1], -1, 2**62])
def test_a_prediction_refuses_a_size_of_another_type(tmp_path, key, value):
    folder = lab.write_target(tmp_path / "t", **{key: value})
    with pytest.raises(CheckpointError, match=key):
        predict(read_config(folder), read_dims(folder), "none", 1, 64)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"hidden_size": ' + "9" * 5_000 + "}"])
def test_a_config_that_no_parser_should_follow_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ('"x"', "a text for a"),
        ('{"dtype": "F32", "shape": "12", "data_offsets": [0, 4]}', "'12' for shape of a"),
        ('{"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}', "for shape of a"),
        ('{"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}', "for shape of a"),
        ('{"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}', "for shape of a"),
        ('{"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}', "for data_offsets of a"),
        ('{"dtype": "F32", "shape": [1], "data_offsets": [0, 1e999]}', "for data_offsets of a"),
        ('{"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}', "unknown dtype"),
        ('{"dtype": "F32", "shape": [0, 1099511627776, 1099511627776], "data_offsets": [0, 0]}', "0 bytes for a"),
        ("[" * 100_000, "nested more than 64"),
    ],
)
def test_a_header_of_other_types_is_refused(tmp_path, entry, words):
    header = b'{"a": ' + entry.encode() + b"}"
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(CheckpointError, match=words):
        read_header(tmp_path / "m.safetensors")


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {"a": "x\0y"}}])
def test_an_index_of_other_types_is_refused(tmp_path, index):
    folder = lab.write_target(tmp_path / "s")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "weight_map" in str(examine(str(folder)).errors[0])
