# SPDX-License-Identifier: Apache-2.0
"""Profiles follow from the graph and the sizes; the recipe may widen them, and choose what is fastest."""

import pytest

from speccompile.backends.tensorrt.config import Config, ProfileConfig
from speccompile.backends.tensorrt.profiles import make_profiles
from speccompile.backends.tensorrt.specs import tensorrt_spec
from speccompile.core.dims import ModelDims
from speccompile.core.jobs import CompileOptions
from speccompile.core.specs import GraphSpec, TensorSpec
from speccompile.errors import BuildError
from speccompile.graph_kinds.decoder import candidate_spec, decoder_spec, rollback_spec, verified_spec

DIMS = ModelDims("llama", 97, 64, 2, 4, 2, 16, 512)
ROWS = 500


def options(**fields):
    return CompileOptions("float16", max_slots=8, max_rows=ROWS, max_nodes=17, backend=Config(**fields))


def target():
    return tensorrt_spec(verified_spec(decoder_spec("target", DIMS)), "float16", ROWS)


def test_a_decoder_has_a_profile_for_prompts_and_one_for_steps():
    prefill, decode = make_profiles(target(), options())
    assert prefill.sizes["batch"] == (1, 1, 1)
    assert prefill.sizes["nodes"] == (1, 128, 128)
    assert decode.sizes["batch"] == (1, 8, 8)
    assert decode.sizes["nodes"] == (1, 17, 17)
    assert decode.sizes["kv"] == (1, ROWS // 2, ROWS)
    assert decode.sizes["draft_vocab"] == (1, 1, DIMS.vocab_size)


def test_shapes_have_static_dims_and_leave_static_inputs_out():
    shapes = make_profiles(target(), options())[1].shapes(target())
    assert shapes["k_cache.0"] == ((1, 2, ROWS, 16), (8, 2, ROWS, 16), (8, 2, ROWS, 16))
    assert shapes["kv_rows"] == ((1,), (250,), (500,))
    assert shapes["uniforms"] == ((1, 1, 2), (8, 17, 2), (8, 17, 2))
    static = GraphSpec("g", (TensorSpec("x", (2, 3), "float16"),), ())
    assert make_profiles(static, options())[0].shapes(static) == {}


def test_a_draft_of_chains_is_fastest_at_one_node():
    spec = tensorrt_spec(candidate_spec(decoder_spec("draft", DIMS), 1, dists=True), "float16", ROWS)
    profiles = make_profiles(spec, options())
    assert [p.sizes["scored"] for p in profiles] == [(1, 1, 17), (1, 1, 17)]
    assert profiles[1].sizes["nodes"] == (1, 1, 17)
    spec = tensorrt_spec(candidate_spec(decoder_spec("draft", DIMS), 4, dists=True), "float16", ROWS)
    assert make_profiles(spec, options())[1].sizes["nodes"] == (1, 17, 17)  # levels of trees


def test_a_graph_without_tokens_has_one_profile():
    (step,) = make_profiles(tensorrt_spec(rollback_spec(DIMS), "float16", ROWS), options())
    assert step.name == "step"
    assert step.sizes["scored"] == (1, 17, 17)
    narrow = options(decode=ProfileConfig(batch=(2, 4, 8)))
    assert make_profiles(tensorrt_spec(rollback_spec(DIMS), "float16", ROWS), narrow) == (
        step,
    )  # of steps of nodes alone


def test_the_recipe_may_widen_and_choose():
    wished = options(decode=ProfileConfig(batch=(1, 4, 16), nodes=(1, 5, 32)))
    decode = make_profiles(target(), wished)[1]
    assert (decode.sizes["batch"], decode.sizes["nodes"]) == ((1, 4, 16), (1, 5, 32))


@pytest.mark.parametrize(
    ("profile", "dim", "wish", "expected"),
    [
        ("decode", "nodes", (1, 4, 16), "a range that holds 1 to 17"),
        ("decode", "batch", (2, 4, 8), "a range that holds 1 to 8"),
        ("prefill", "nodes", (1, 64, 100), "a range that holds 1 to 128"),
        ("decode", "kv", (1, 100, 501), "at most the 500 cache rows of target"),
    ],
)
def test_a_profile_that_the_runtime_would_leave_is_refused(profile, dim, wish, expected):
    with pytest.raises(BuildError) as caught:
        make_profiles(target(), options(**{profile: ProfileConfig(**{dim: wish})}))
    assert caught.value.where == f"engine.tensorrt.{profile}.{dim}"
    assert caught.value.got == str(list(wish))
    assert caught.value.expected == expected


def test_a_short_cache_has_a_short_prefill():
    small = CompileOptions("float16", 1, 40, 9)
    assert make_profiles(target(), small)[0].sizes["nodes"] == (1, 40, 40)


def test_a_dim_without_a_size_is_an_error():
    odd = GraphSpec("g", (TensorSpec("x", ("surprise",), "float16"),), ())
    with pytest.raises(BuildError, match="dim 'surprise'"):
        make_profiles(odd, options())
