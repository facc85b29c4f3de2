# SPDX-License-Identifier: Apache-2.0
"""What a GGUF file says and nobody reads is refused by name, and a damaged file at once; nothing is left over."""

import struct
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from typer.testing import CliRunner

from speccompile.checkpoints.checkpoint import read_config
from speccompile.checkpoints.folders import resolve_checkpoint
from speccompile.checkpoints.gguf.header import read_gguf
from speccompile.checkpoints.model_config import read_model_config
from speccompile.cli.main import app
from speccompile.errors import CheckpointError
from speccompile.export import attention
from speccompile.export.weights import load_model
from tests.checkpoints.gguf_lab import MODELS, TOKENIZER, write_file, write_model

pytestmark = pytest.mark.export


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path / "cache"))
    attention.register()
    return tmp_path / "cache" / "gguf"


def without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.pop(name)


def added(*names: str, shape: tuple[int, ...] = (32,)) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.update({name: ("F32", np.ones(shape, np.float32)) for name in names})


def renamed(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


KEYS: dict[str, tuple[str, dict[str, Any], str]] = {
    "yarn without a factor": ("llama", {"rope.scaling.type": "yarn"}, r"llama.rope.scaling.type\): got .*yarn"),
    "a scaling of nobody": ("llama", {"rope.scaling.type": "dynamic"}, r"llama.rope.scaling.type\): got .*dynamic"),
    "yarn with another scale of attention": (
        "qwen2 with yarn", {"rope.scaling.attn_factor": 1.5}, r"qwen2.rope.scaling.attn_factor\): got 1.5"),
    "part of a head rotated": ("llama", {"rope.dimension_count": 32}, r"llama.rope.dimension_count\): got 32"),
    "another width of values": ("llama", {"attention.value_length": 32}, r"value_length\): got 32; expected 64"),
    "another scale of queries": ("qwen3", {"attention.scale": 0.5}, r"qwen3.attention.scale\): got 0.5"),
    "capped logits": ("llama", {"final_logit_softcapping": 30.0}, "llama.final_logit_softcapping"),
    "scaled logits": ("llama", {"logit_scale": 0.5}, "llama.logit_scale"),
    "a window": ("qwen3", {"attention.sliding_window": 16}, "qwen3.attention.sliding_window"),
    "no window": ("gemma3", {"attention.sliding_window": None}, r"gemma3.attention.sliding_window\): got None"),
    "encoders": ("llama", {"attention.causal": False}, r"llama.attention.causal\): got False; expected True"),
    "another gate of experts": ("qwen3moe", {"expert_gating_func": 2}, r"qwen3moe.expert_gating_func\): got 2"),
    "experts that are not normalised": ("qwen3moe", {"expert_weights_norm": False}, "qwen3moe.expert_weights_norm"),
    "scaled experts": ("qwen3moe", {"expert_weights_scale": 2.5}, "qwen3moe.expert_weights_scale"),
    "a key of nobody": ("llama", {"future": 1}, r"llama.future\): got 1; expected keys that are read"),
    "another vocabulary": ("llama", {"vocab_size": 99}, r"llama.vocab_size\): got 99; expected 160"),
    "no layers": ("llama", {"block_count": None}, r"llama.block_count\): got None; expected a positive"),
    "more layers than there are": ("gemma3", {"block_count": 1 << 30}, "got 1073741824; expected at most 7"),
    "no heads": ("llama", {"attention.head_count": 0}, r"llama.attention.head_count\): got 0"),
    "heads that differ by layer": ("llama", {"attention.head_count_kv": [2, 1]}, "one number for all layers"),
    "no heads of keys": ("llama", {"attention.head_count_kv": 0}, r"head_count_kv\): got 0; expected a positive"),
    "less than no heads of keys": ("llama", {"attention.head_count_kv": -2}, r"head_count_kv\): got -2; expected a"),
    "more heads than columns": (
        "llama", {"attention.head_count": 512, "attention.key_length": None}, r"head_count\): got 512; expected at"),
    "a text as base": ("llama", {"rope.freq_base": "x"}, r"llama.rope.freq_base\): got 'x'; expected one number"),
    "no number as base": ("llama", {"rope.freq_base": float("nan")}, r"rope.freq_base\): got nan; expected one number"),
    "a text as factor": (
        "llama", {"rope.scaling.type": "linear", "rope.scaling.factor": "x"}, r"scaling.factor\): got 'x'"),
    "a text as scale": ("llama", {"attention.scale": "x"}, r"llama.attention.scale\): got 'x'; expected one number"),
    "heads that do not divide the rows": ("llama", {"attention.head_count": 3}, "attn_q.weight.*rows of 3 heads"),
}  # fmt: skip


@pytest.mark.parametrize(("model", "keys", "said"), KEYS.values(), ids=KEYS)
def test_a_key_that_changes_numbers_is_refused(model, keys, said, tmp_path, cache):
    write_model(tmp_path / "model.gguf", model, keys=keys)
    with pytest.raises(CheckpointError, match=said) as caught:
        resolve_checkpoint(str(tmp_path / "model.gguf"))
    assert str(tmp_path / "model.gguf") in caught.value.where
    assert not list(cache.glob("*"))


@pytest.mark.parametrize("token", ["x", [1, 2], 1.5, -1])
def test_a_token_id_of_a_wrong_type_is_refused(token, tmp_path):
    write_model(tmp_path / "model.gguf", "llama", tokenizer=TOKENIZER | {"tokenizer.ggml.eos_token_id": token})
    with pytest.raises(CheckpointError, match=r"tokenizer.ggml.eos_token_id\): got .*; expected a token id"):
        resolve_checkpoint(str(tmp_path / "model.gguf"))


TENSORS: dict[str, tuple[str, Callable[[dict[str, Any]], None], str]] = {
    "a misnamed tensor": ("llama", renamed("blk.0.ffn_up.weight", "blk.0.ffn_upp.weight"), "1 tensors .*ffn_upp"),
    "heads of drafts": ("llama", added("blk.0.nextn.eh_proj.weight"), r"blk.0.nextn.eh_proj.weight"),
    "no embedding": ("llama", without("token_embd.weight"), "no token_embd.weight"),
    "an embedding that is no matrix": (
        "llama", lambda t: t.update({"token_embd.weight": ("F32", np.ones((), np.float32))}), "embd.weight.*a matrix"),
    "a gate without its partner": ("gpt-oss", without("blk.1.ffn_up_exps.weight"), "ffn_gate_exps.*no tensor"),
    "one list of factors": ("phi3 with factors", without("rope_factors_long.weight"), "rope_factors_short.weight, o"),
    "separate experts": ("mixtral", renamed("blk.0.ffn_up_exps.weight", "blk.0.ffn_up.0.weight"), "ffn_up.0.weight"),
}  # fmt: skip
LOADED = {
    "a missing tensor": (without("blk.0.ffn_up.weight"), r"1 missing weights \(model.layers.0.mlp.up_proj.weight\)"),
    "a missing norm": (without("output_norm.weight"), r"missing weights \(model.norm.weight\)"),
    "a layer that is left over": (added("blk.2.attn_norm.weight", shape=(256,)), "layers.2.input_layernorm.weight"),
    "another shape": (added("blk.0.attn_norm.weight", shape=(128,)), "1 weights of another shape"),
    "values that are no numbers": (lambda t: t["output_norm.weight"][1].fill(np.nan), "NaN or infinite"),
}


@pytest.mark.parametrize(("model", "change", "said"), TENSORS.values(), ids=TENSORS)
def test_a_tensor_that_nobody_reads_is_refused(model, change, said, tmp_path):
    write_model(tmp_path / "model.gguf", model, change=change)
    with pytest.raises(CheckpointError, match=said):
        resolve_checkpoint(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(("change", "said"), LOADED.values(), ids=LOADED)
def test_weights_that_do_not_make_the_model_are_refused(change, said, tmp_path):
    path = tmp_path / "model.gguf"
    write_model(path, "llama", change=change)
    with pytest.raises(CheckpointError, match=said) as caught:
        load_model(resolve_checkpoint(str(path)), "checkpoint")
    assert str(path) in caught.value.where


SAME: dict[str, tuple[str, dict[str, Any]]] = {
    "no scaling": ("llama", {"rope.scaling.type": "none", "rope.scaling.finetuned": True}),
    "a factor of one": ("llama", {"rope.scaling.factor": 1.0, "rope.scaling.attn_factor": 1.0}),
    "the usual scale of queries": ("qwen3", {"attention.scale": 128**-0.5}),
    "heads by layer that are the same": ("llama", {"attention.head_count_kv": [2, 2]}),
    "a pattern of windows": ("gemma3", {"attention.sliding_window_pattern": 6}),
    "the base of the layers with a window": ("gemma3", {"rope.freq_base_swa": 10000.0}),
    "a gate by softmax": ("qwen3moe", {"expert_gating_func": 1, "expert_weights_norm": True}),
    "causal attention": ("llama", {"attention.causal": True, "pooling_type": 0}),
}


@pytest.mark.parametrize(("model", "keys"), SAME.values(), ids=SAME)
def test_keys_that_say_the_same_make_the_same_config(model, keys, tmp_path):
    (tmp_path / "plain").mkdir()
    write_model(tmp_path / "plain" / "model.gguf", model)
    write_model(tmp_path / "model.gguf", model, keys=keys)
    folders = [resolve_checkpoint(str(tmp_path / name)) for name in ("plain/model.gguf", "model.gguf")]
    assert read_config(folders[0]) == read_config(folders[1])


def test_a_window_by_layer_is_read(tmp_path):
    has_window = [True, False, True, True, False, False, True]
    write_model(tmp_path / "model.gguf", "gemma3", keys={"attention.sliding_window_pattern": has_window})
    kinds = read_model_config(resolve_checkpoint(str(tmp_path / "model.gguf"))).layer_types
    assert [kind == "sliding_attention" for kind in kinds] == has_window


@pytest.mark.parametrize(("fields", "said"), [
    ({"general.architecture": "mamba"}, r"general.architecture\): got .*mamba.*; expected one of llama, qwen2"),
    ({"general.type": "adapter"}, "got 'adapter'; expected the weights of a model"),
    ({"general.type": "mmproj"}, "got 'mmproj'; expected the weights of a model"),
    ({"adapter.lora.alpha": 8.0}, r"adapter.lora.alpha\)"),
], ids=["architecture", "adapter", "projector", "adapter's key"])  # fmt: skip
def test_files_of_other_things_are_refused(fields, said, tmp_path):
    arch = fields.pop("general.architecture", "llama")
    sizes = {"context_length": 8, "embedding_length": 8, "block_count": 1, "attention.head_count": 1}
    keys = {f"{arch}.{key}": value for key, value in sizes.items()} | fields
    write_file(tmp_path / "m.gguf", arch, keys, {"token_embd.weight": ("F32", np.ones((4, 8), np.float32))})
    with pytest.raises(CheckpointError, match=said):
        resolve_checkpoint(str(tmp_path / "m.gguf"))


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(*fields: bytes, num: int | None = None, tensors: tuple[bytes, ...] = ()) -> bytes:
    sizes = struct.pack("<IQQ", 3, len(tensors), len(fields) if num is None else num)
    return b"GGUF" + sizes + b"".join(fields) + b"".join(tensors)


def tensor(name: str, *dims: int, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


ARRAY, NESTED = struct.pack("<I", 9), struct.pack("<IQ", 9, 1)
HOSTILE = {
    "an endless array": (header(text("a") + ARRAY + struct.pack("<IQ", 0, 1 << 60)), "1152921504606846976 items"),
    "many arrays": (header(*[text(str(n)) + ARRAY + struct.pack("<IQ", 0, 1 << 21) + bytes(1 << 21) for n in range(3)]),
                    "2097152 items for '2'"),
    "arrays in arrays": (header(text("a") + ARRAY + NESTED * 5000), "arrays in an array"),
    "an endless text": (header(text("a") + struct.pack("<IQ", 8, 1 << 62)), "a text of"),
    "an endless text in an array": (header(text("a") + ARRAY + struct.pack("<IQQ", 8, 1, 1 << 62)), "a text of"),
    "an array that ends early": (header(text("a") + ARRAY + struct.pack("<IQ", 4, 1000)), "end within the header"),
    "texts that end early": (header(text("a") + ARRAY + struct.pack("<IQ", 8, 1000)), "end within the header"),
    "endless keys": (header(num=1 << 60), "end within the header"),
    "the other byte order": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648"),
    "an unknown type": (header(text("a") + struct.pack("<I", 13)), "unknown type 13"),
    "an array of an unknown type": (header(text("a") + ARRAY + struct.pack("<IQ", 13, 1)), "unknown type 13"),
    "a key twice": (header(*[text("a") + struct.pack("<IB", 0, 1)] * 2), "key 'a' twice"),
    "a tensor twice": (header(tensors=(tensor("a", 1), tensor("a", 1))), "tensor 'a' twice"),
    "an alignment of nothing": (header(text("general.alignment") + struct.pack("<II", 4, 0)), "general.alignment 0"),
    "a tensor beyond the end": (header(tensors=(tensor("a", 8, offset=1 << 40),)), "where a ends at byte"),
    "a huge tensor": (header(tensors=(tensor("a", 1 << 62, 1 << 62),)), "a of F32 and shape"),
    "an empty tensor": (header(tensors=(tensor("a", 0, 1 << 40),)), r"a of F32 and shape \[1099511627776, 0\]"),
    "half a block": (header(tensors=(tensor("a", 48, kind=8),)), r"a of Q8_0 and shape \[48\]"),
    "a block type of nobody": (header(tensors=(tensor("a", 32, kind=999),)), r"\(a\): got the block type 999"),
    "a block type that is not read": (header(tensors=(tensor("a", 32, kind=40),)), r"\(a\): got NVFP4; .*llama-quant"),
    "another file": (b"PK\3\4" + bytes(40), "begins with"),
    "nothing": (b"", "empty"),
}  # fmt: skip


@pytest.mark.parametrize("texts", [False, True])
@pytest.mark.parametrize(("data", "said"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_header_is_refused_at_once(data, said, texts, tmp_path):
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=said):
        read_gguf(tmp_path / "model.gguf", texts=texts)


def test_every_block_type_is_read_or_named():
    from speccompile.checkpoints.gguf.blocks import name_of_kind

    assert [kind.name for kind in GGMLQuantizationType if name_of_kind(kind.value) != kind.name] in ([], ["Q1_0"])


def split(source: Path, folder: Path, num: int, model: str = "llama") -> list[Path]:
    """Writes the tensors of a file in several ones, as llama-gguf-split does."""
    held = read_gguf(source, texts=True)
    files = [folder / f"part-{part + 1:05d}-of-{num:05d}.gguf" for part in range(num)]
    names = list(held.tensors)
    for part, file in enumerate(files):
        keys: dict[str, Any] = {"split.no": part, "split.count": num, "split.tensors.count": len(names)}
        if part == 0:
            keys |= {k: v for k, v in held.fields.items() if k != "general.architecture"}
        own = {n: ("F32", np.memmap(source, "<f4", "r", held.tensors[n].start_bytes, held.tensors[n].shape))
               for n in names[part::num]}  # fmt: skip
        write_file(file, MODELS[model][0], keys, own)
    return files


def test_a_model_in_several_files_is_read_from_any_of_them(tmp_path):
    write_model(tmp_path / "whole.gguf", "llama")
    (tmp_path / "parts").mkdir()
    parts = split(tmp_path / "whole.gguf", tmp_path / "parts", 3)
    whole = load_model(resolve_checkpoint(str(tmp_path / "whole.gguf")), "checkpoint").state_dict()
    folders = {resolve_checkpoint(str(path)) for path in (*parts, tmp_path / "parts")}
    assert len(folders) == 1
    made = load_model(folders.pop(), "checkpoint").state_dict()
    assert all(made[key].equal(value) for key, value in whole.items())


def test_parts_that_are_missing_or_of_another_model_are_named(tmp_path):
    write_model(tmp_path / "whole.gguf", "llama")
    (tmp_path / "parts").mkdir()
    first, second, third = split(tmp_path / "whole.gguf", tmp_path / "parts", 3)
    data = second.read_bytes()
    second.unlink()
    with pytest.raises(CheckpointError, match=r"got no part-00002-of-00003.gguf; expected all 3 files"):
        resolve_checkpoint(str(third))
    second.write_bytes(third.read_bytes())
    with pytest.raises(CheckpointError, match=r"part-00002-of-00003.gguf: got part 2 .*expected part 1"):
        resolve_checkpoint(str(first))
    second.write_bytes(data)
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match=r"got one of 3 parts of a model"):
        resolve_checkpoint(str(alone))


def test_the_command_writes_a_whole_checkpoint_or_nothing(tmp_path):
    source = write_model(tmp_path / "model.gguf", "llama", "Q8_0").state_dict()
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "model.gguf"), "-o", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "Q8_0" in done.output
    assert "tokenizer.json" in done.output
    made = load_model(tmp_path / "out", "checkpoint").state_dict()
    assert all(made[key].equal(value) for key, value in source.items())
    data = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "half.gguf").write_bytes(data[: len(data) // 2])
    for name in ("half.gguf", "none.gguf"):
        done = CliRunner().invoke(app, ["convert", str(tmp_path / name), "-o", str(tmp_path / "other")])
        assert done.exit_code != 0
        assert name in str(done.exception) + done.output
        assert not (tmp_path / "other").exists()


def write_named(folder: Path, *names: str) -> Mapping[str, Path]:
    folder.mkdir(exist_ok=True)
    for name in names:
        write_model(folder / name, "llama")
    return {name: folder / name for name in names}


def test_a_folder_with_one_file_is_that_model_and_one_of_several_is_asked_for(tmp_path):
    folder = tmp_path / "model"
    files = write_named(folder, "a.Q8_0.gguf")
    (folder / "README.md").write_text("")
    (folder / "mmproj-a.gguf").write_bytes(b"GGUF")
    found = resolve_checkpoint(str(folder))
    assert found == resolve_checkpoint(str(files["a.Q8_0.gguf"]))
    assert found == resolve_checkpoint(str(found)), "a folder that was made of a file is one"
    write_named(folder, "b.Q4_0.gguf")
    with pytest.raises(CheckpointError, match=r"2 GGUF files \(a.Q8_0.gguf, b.Q4_0.gguf\).*Name one: .*/a.Q8_0.gguf"):
        resolve_checkpoint(str(folder))
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    assert resolve_checkpoint(str(folder)) == folder, "weights in safetensors come first"


def test_another_file_of_the_same_name_makes_another_folder(tmp_path):
    path = tmp_path / "model.gguf"
    write_model(path, "llama")
    first = resolve_checkpoint(str(path))
    write_model(path, "qwen2")
    second = resolve_checkpoint(str(path))
    assert read_model_config(first).model_type == "llama"
    assert read_model_config(second).model_type == "qwen2"
    assert (first / "weights.gguf").resolve() == path


def fake_hub(monkeypatch: pytest.MonkeyPatch, folder: Path, repository: Path) -> list[str]:
    """Makes `folder` the snapshot of OWNER/NAME, whose files lie in `repository`; returns what is asked for."""
    asked: list[str] = []

    def download(name: str, allow_patterns: list[str], dry_run: bool = False, **options: Any) -> Any:
        names = [str(f.relative_to(repository)) for f in repository.rglob("*") if f.is_file()]
        wanted = sorted(n for n in names if any(fnmatch(n, pattern) for pattern in allow_patterns))
        if dry_run:
            return [SimpleNamespace(filename=n) for n in wanted]
        asked.extend(wanted)
        for n in wanted:
            (folder / n).parent.mkdir(parents=True, exist_ok=True)
            (folder / n).write_bytes((repository / n).read_bytes())
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    folder.mkdir()
    return asked


def test_a_repository_with_gguf_files_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    repository = tmp_path / "repository"
    write_named(repository, "a.Q8_0.gguf", "mmproj-a.gguf")
    (repository / "config.json").write_text("{}")
    asked = fake_hub(monkeypatch, tmp_path / "snapshot", repository)
    found = resolve_checkpoint("OWNER/NAME")
    assert asked == ["config.json", "a.Q8_0.gguf"]
    assert (found / "weights.gguf").resolve() == tmp_path / "snapshot" / "a.Q8_0.gguf"
    write_named(repository / "more", "b.gguf")
    for name in (*(repository / "more").iterdir(), tmp_path / "snapshot" / "a.Q8_0.gguf"):
        assert name.is_file()
    (tmp_path / "snapshot" / "a.Q8_0.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"OWNER/NAME: got 2 GGUF files .*Name one: OWNER/NAME/a.Q8_0.gguf"):
        resolve_checkpoint("OWNER/NAME")
    asked.clear()
    found = resolve_checkpoint("OWNER/NAME/more/b.gguf")
    assert asked == ["more/b.gguf"]
    assert (found / "weights.gguf").resolve() == tmp_path / "snapshot" / "more" / "b.gguf"
    with pytest.raises(CheckpointError, match=r"no such file"):
        resolve_checkpoint("OWNER/NAME/c.gguf")


def test_a_repository_with_other_weights_is_not_asked_for_gguf_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    repository = tmp_path / "repository"
    write_named(repository, "a.gguf")
    for name in ("config.json", "model.safetensors"):
        (repository / name).write_text("{}")
    asked = fake_hub(monkeypatch, tmp_path / "snapshot", repository)
    assert resolve_checkpoint("OWNER/NAME") == tmp_path / "snapshot"
    assert asked == ["config.json", "model.safetensors"]
