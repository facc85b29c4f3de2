# SPDX-License-Identifier: Apache-2.0
"""Fields of a recipe that the installed TensorRT does not support are refused, with the supported values."""

from types import SimpleNamespace

import pytest

from speccompile.backends.tensorrt import import_helper
from speccompile.backends.tensorrt import settings as settings_module
from speccompile.backends.tensorrt.config import Config
from speccompile.backends.tensorrt.network import load_timing_cache, save_timing_cache
from speccompile.backends.tensorrt.settings import memory_limit, settings_from_options, timing_cache_file
from speccompile.backends.tensorrt.variants import TENSORRT, TENSORRT_RTX, Variant
from speccompile.core import registry
from speccompile.core.dims import ModelDims
from speccompile.core.jobs import CompileOptions
from speccompile.core.specs import GraphSpec
from speccompile.errors import BuildError
from speccompile.graph_kinds.decoder import candidate_spec, decoder_spec, verified_spec

SPEC = GraphSpec("g", (), ())


def settings(variant, quantization="none", dtype="float16", **fields):
    return settings_from_options(variant, SPEC, CompileOptions(dtype, backend=Config(**fields)), (), (), quantization)


def test_defaults_leave_everything_to_the_variant():
    made = settings(TENSORRT_RTX)
    assert made["compute_capabilities"] == []
    assert made["flags"] == []
    assert (made["workspace_gib"], made["optimization_level"]) == ("auto", "auto")


def test_fields_arrive():
    made = settings(TENSORRT_RTX, compute_capabilities=("8.9", "12.0"), weight_streaming=True, workspace_gib=2.0)
    assert made["compute_capabilities"] == ["8.9", "12.0"]
    assert made["flags"] == ["WEIGHT_STREAMING"]
    assert made["workspace_gib"] == 2.0
    assert settings(TENSORRT, optimization_level=5)["optimization_level"] == 5


@pytest.mark.parametrize(
    ("variant", "quantization", "fields", "where", "expected"),
    [
        (TENSORRT_RTX, "none", {"compute_capabilities": ("9.0",)}, "compute_capabilities", "some of 7.5, 8.0"),
        (TENSORRT, "none", {"compute_capabilities": ("8.9",)}, "compute_capabilities", "the GPU it builds on"),
        (TENSORRT_RTX, "none", {"optimization_level": 3}, "optimization_level", "no such levels"),
        (TENSORRT_RTX, "fp8", {"compute_capabilities": ("8.6",)}, "compute_capabilities", "some of 8.9, 12.0, 12.1"),
    ],
)
def test_what_the_variant_does_not_do_is_refused(variant, quantization, fields, where, expected):
    with pytest.raises(BuildError) as caught:
        settings(variant, quantization, **fields)
    assert caught.value.where == f"engine.tensorrt.{where}"
    assert expected in caught.value.expected


@pytest.mark.parametrize(
    ("max_nodes", "vocab", "where", "expected"),
    [
        (257, 97, "engine.max_draft_nodes: got 256", "at most 255 with the plugin SpecVerify"),
        (17, 524289, "the vocabulary of target: got 524289", "at most 524288 with the plugin SpecVerify"),
    ],
)
def test_more_than_the_plugin_holds_is_refused_before_anything_is_built(monkeypatch, max_nodes, vocab, where, expected):
    monkeypatch.setattr(import_helper, "load_tensorrt", lambda name: SimpleNamespace(can=TENSORRT_RTX))
    decoder = decoder_spec("target", ModelDims("llama", vocab, 64, 1, 2, 1, 16, 1024))

    def check(spec, max_nodes=max_nodes, **fields):
        options = CompileOptions("float16", max_rows=1024, max_nodes=max_nodes, backend=Config(**fields))
        registry.backend("tensorrt").check(spec, options, "none")

    with pytest.raises(BuildError, match=f"{where}; expected {expected}.*engine.plugins: none"):
        check(verified_spec(decoder))
    check(verified_spec(decoder), plugins="none")
    check(candidate_spec(decoder, 1, dists=True))
    if vocab == 97:
        check(verified_spec(decoder), max_nodes=256)


@pytest.mark.parametrize(
    ("quantization", "dtype", "named", "got", "todo"),
    [
        ("none", "bfloat16", ("7.5",), "7.5 with bfloat16", "target.dtype: float16"),
        ("int8", "bfloat16", ("8.9", "7.5"), "7.5 with bfloat16", "target.dtype: float16"),
        ("fp8", "bfloat16", ("8.6",), "8.6 with fp8", "quantise to int8"),
        ("fp8", "float16", ("12.0", "8.0"), "8.0 with fp8", "quantise to int8"),
        ("none", "bfloat16", ("8.0", "12.0"), None, None),
        ("none", "bfloat16", (), None, None),
        ("none", "float16", ("7.5",), None, None),
    ],
)
def test_gpus_without_kernels_of_the_form_are_refused_before_the_export(quantization, dtype, named, got, todo):
    if got is None:
        assert settings(TENSORRT_RTX, quantization, dtype, compute_capabilities=named)["compute_capabilities"] == [
            *named
        ]
        return
    with pytest.raises(BuildError, match=rf"compute_capabilities: got {got}; expected some of 8\..*{todo}"):
        settings(TENSORRT_RTX, quantization, dtype, compute_capabilities=named)


def test_fp8_is_built_for_the_gpus_that_have_it():
    assert settings(TENSORRT_RTX, "fp8")["compute_capabilities"] == ["8.9", "12.0", "12.1"]


def test_a_limit_of_memory_is_in_bytes():
    assert memory_limit(CompileOptions(backend=Config(max_build_gib=1.5))) == 3 << 29
    assert memory_limit(CompileOptions()) is None


FULL = Variant(TENSORRT, SimpleNamespace(), "11.4", None)


def test_measured_kernels_are_kept_by_gpu(monkeypatch):
    files = {}
    for gpus in ((), (("L4", 8, 9),), (("L40S", 8, 9),), (("L4", 9, 0),), (("L4", 8, 9), ("T4", 7, 5))):
        monkeypatch.setattr(settings_module, "find_gpus", lambda gpus=gpus: gpus)
        files[gpus] = timing_cache_file(FULL, CompileOptions())
    assert len(set(files.values())) == 4  # the builder takes the first GPU
    assert timing_cache_file(FULL, CompileOptions(backend=Config(timing_cache=False))) is None
    assert timing_cache_file(Variant(TENSORRT_RTX, SimpleNamespace(), "1", None), CompileOptions()) is None


class TimingConfig:
    """A builder's configuration that refuses kernels of another GPU."""

    held = None

    def create_timing_cache(self, blob):
        if blob == b"damaged":
            return None
        return SimpleNamespace(blob=blob, serialize=lambda: blob)

    def set_timing_cache(self, cache, ignore_mismatch):
        assert ignore_mismatch is False
        if cache.blob == b"another GPU":
            return False
        self.held = cache
        return True

    def get_timing_cache(self):
        return self.held


KEPT = [(None, b""), (b"this GPU", b"this GPU"), (b"another GPU", b""), (b"damaged", b"")]


@pytest.mark.parametrize(("kept", "used"), KEPT)
def test_kernels_measured_on_another_gpu_are_measured_again(tmp_path, kept, used):
    path, config = tmp_path / "deep" / "kernels.timings", TimingConfig()
    save_timing_cache(config, path)
    assert not path.parent.exists()  # the builder has none
    if kept is not None:
        path.parent.mkdir()
        path.write_bytes(kept)
    assert load_timing_cache(FULL, config, path) is config.held
    assert config.held.blob == used
    save_timing_cache(config, path)
    assert path.read_bytes() == used
