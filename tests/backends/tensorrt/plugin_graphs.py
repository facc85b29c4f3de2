# SPDX-License-Identifier: Apache-2.0
"""A tiny target step with both plugins, and a plan of it."""

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import TensorProto, helper

from speccompile.backends.tensorrt.plugin_names import KV_ROLLBACK, NUM_CACHES, SPEC_VERIFY
from speccompile.backends.tensorrt.variants import Variant
from speccompile.ops.op import DOMAIN, VERSION
from speccompile.ops.registry import functions

VOCAB, HIDDEN, HEADS, ROWS, HEAD_DIM = 97, 16, 2, 32, 8
KINDS = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
RANGES = {"batch": (1, 2, 4), "nodes": (1, 4, 8), "draft_vocab": (1, VOCAB, VOCAB), "map": (50, 50, 50)}


def _value(name: str, kind: int, dims: Sequence[str | int]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, dims)


def step_model(
    dtype: str, num_caches: int = 4, *, has_body: bool = False, has_map: bool = False, says_num_caches: bool = True
) -> onnx.ModelProto:
    """hidden -> logits -> SpecVerify; caches -> TensorScatter -> KVRollback along its path (none: no caches)."""
    kind, ints, reals = KINDS[dtype], TensorProto.INT64, TensorProto.FLOAT
    inputs = [_value("hidden", kind, ["batch", "nodes", HIDDEN])]
    inputs += [_value(n, ints, ["batch", "nodes"]) for n in ("tokens", "parents")]
    inputs += [_value("draft_probs", reals, ["batch", "nodes", "draft_vocab"])]
    inputs += [_value("uniforms", reals, ["batch", "nodes", 2]), _value("temperature", reals, ["batch"])]
    inputs += [_value("top_k", ints, ["batch"]), _value("top_p", reals, ["batch"])]
    inputs += [_value("d2t", ints, ["map"])] if has_map else []
    verify_inputs = ["logits", *(i.name for i in inputs[1:])]
    outputs = [_value("path", ints, ["batch", "nodes"]), *(_value(n, ints, ["batch"]) for n in ("kept", "next"))]
    nodes = [
        helper.make_node("MatMul", ["hidden", "head"], ["logits"]),
        helper.make_node(SPEC_VERIFY, verify_inputs, [o.name for o in outputs], "verify", domain=DOMAIN),
    ]
    inputs += [_value("lengths", ints, ["batch"])] if num_caches else []
    shape = ["batch", HEADS, ROWS, HEAD_DIM]
    for i in range(num_caches):
        inputs += [_value(f"cache.{i}", kind, shape), _value(f"new.{i}", kind, ["batch", HEADS, "nodes", HEAD_DIM])]
        nodes.append(helper.make_node("TensorScatter", [f"cache.{i}", f"new.{i}", "lengths"], [f"updated.{i}"], axis=2))
    updated, compacted = ([f"{n}.{i}" for i in range(num_caches)] for n in ("updated", "compacted"))
    outputs += [_value(n, kind, shape) for n in (*updated, *compacted)]
    if num_caches:
        said = {NUM_CACHES: num_caches} if says_num_caches else {}
        nodes.append(
            helper.make_node(KV_ROLLBACK, [*updated, "lengths", "path"], compacted, "compact", domain=DOMAIN, **said)
        )
    size = 4 if dtype == "float32" else 2
    head = helper.make_tensor("head", kind, [HIDDEN, VOCAB], bytes(HIDDEN * VOCAB * size), raw=True)
    return helper.make_model(
        helper.make_graph(nodes, "step", inputs, outputs, [head]),
        opset_imports=[helper.make_opsetid("", 24), helper.make_opsetid(DOMAIN, VERSION)],
        functions=functions([SPEC_VERIFY]) if has_body else [],
        ir_version=11,
    )


def parse(variant: Variant, model: onnx.ModelProto, *, overrides: bool = True) -> tuple[Any, Any, list[str]]:
    """(builder, network, parser errors)."""
    trt = variant.trt
    builder = trt.Builder(variant.logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, variant.logger)
    if overrides:
        parser.set_flag(trt.OnnxParserFlag.ENABLE_PLUGIN_OVERRIDE)
    parser.parse(model.SerializeToString())
    return builder, network, [parser.get_error(i).desc() for i in range(parser.num_errors)]


def plugins_in(trt: Any, network: Any) -> list[str]:
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    return [layer.name for layer in layers if layer.type == trt.LayerType.PLUGIN_V3]


def build(variant: Variant, model: onnx.ModelProto, *, aliases: bool = True, embed: Sequence[str] = ()) -> bytes | None:
    """The plan of a model, dynamic batch, nodes and draft vocabulary; None when the builder refuses."""
    trt = variant.trt
    builder, network, errors = parse(variant, model)
    assert errors == []
    config = builder.create_builder_config()
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, aliases)
    if embed:
        config.plugins_to_serialize = list(embed)
    profile = builder.create_optimization_profile()
    for value in model.graph.input:
        dims = [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        if any(isinstance(d, str) for d in dims):
            shapes = [[RANGES[d][i] if isinstance(d, str) else d for d in dims] for i in range(3)]
            profile.set_shape(value.name, *shapes)
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    return None if plan is None else bytes(plan)
