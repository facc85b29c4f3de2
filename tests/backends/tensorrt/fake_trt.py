# SPDX-License-Identifier: Apache-2.0
"""TensorRT's runtime interface over the fake device. A plan names an ONNX graph, which runs instead.

A context checks what TensorRT leaves to the caller: every tensor has an address and a shape inside the profile,
a cache has one address as input, as update and as compacted form, nothing else overlaps, a captured context does
not change. `kv_rows` cuts the caches that the graph sees, so too small a number shows as an error or wrong tokens.
"""

import json
import mmap
from collections import deque
from enum import Enum
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import onnxruntime as ort

from speccompile.backends.tensorrt.variants import VARIANTS, Variant
from speccompile.core import specs
from speccompile.core.specs import compacted_cache_name, spec_from_json, updated_cache_name
from speccompile.graph_kinds.features import NEXT_STATES
from speccompile.ops.kv_rollback import kv_rollback
from tests.backends.tensorrt.fake_cuda import ALIGNMENT, FakeCuda

DataType = Enum("DataType", ["FLOAT", "HALF", "BF16", "INT64", "INT32", "INT8", "BOOL"])
Mode = Enum("Mode", ["INPUT", "OUTPUT"])
Location = Enum("Location", ["DEVICE", "HOST"])
Strategy = Enum("Strategy", ["STATIC", "USER_MANAGED"])
GraphStrategy = Enum("GraphStrategy", ["DISABLED", "WHOLE_GRAPH_CAPTURE"])
KernelStrategy = Enum("KernelStrategy", ["LAZY", "EAGER", "NONE"])
Validity = Enum("Validity", ["VALID", "INVALID"])
FAULTY = {b"garbage": "the magic tag does not match", b"huge": "Error Code 2: OutOfMemory (Requested size was 9)"}
NUMPY = {
    "float32": ("FLOAT", np.float32),
    "float16": ("HALF", np.float16),
    "bfloat16": ("BF16", ml_dtypes.bfloat16),
    "int64": ("INT64", np.int64),
    "int8": ("INT8", np.int8),
    "bool": ("BOOL", np.bool_),
}


def write_plan(path: Path, graph: Path | None, spec, profiles, **more) -> Path:
    """A plan: `spec` is its interface, `graph` an ONNX file with the same plain tensors in float32; None: `MadeUp`.

    Args:
        profiles: list of {dim name: (min, max)}.
        more: `told` (its interface if another), `validity`, `streamable_bytes` of weights.
    """
    record = {"graph": graph and str(graph), "spec": spec.json_from_spec(), "profiles": profiles, **more}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))
    return path


class FakeTrt:
    """The module and its objects.

    Args:
        cuda: the device.
        name: variant.
    """

    TensorIOMode, TensorLocation, ExecutionContextAllocationStrategy = Mode, Location, Strategy
    CudaGraphStrategy, DataType, DynamicShapesKernelSpecializationStrategy = GraphStrategy, DataType, KernelStrategy

    def __init__(self, cuda: FakeCuda, name: str = "tensorrt") -> None:
        self.cuda = cuda
        self.variant = Variant(VARIANTS[name], self, "0.0", SimpleNamespace(lines=deque()))
        self.contexts: list[FakeContext] = []
        self.deserialized: list[bytes] = []
        self.devices: list[int] = []  # the current device whenever a plan was deserialised

    def Runtime(self, logger):
        assert logger is self.variant.logger
        return FakeRuntime(self)


class FakeRuntime:
    def __init__(self, trt):
        self.trt = trt

    def get_engine_validity(self, plan):
        assert self.trt.variant.can.supports_validity_check
        wanted = json.loads(bytes(plan)).get("validity", "VALID")
        return Validity[wanted], SimpleNamespace(name="UNSUPPORTED_CC" if wanted == "INVALID" else "NONE")

    def deserialize_cuda_engine(self, plan):
        assert isinstance(plan, mmap.mmap), "the plan would be held twice"
        plan = bytes(plan)
        self.trt.deserialized.append(plan)
        self.trt.devices.append(self.trt.cuda.current)
        for content, line in FAULTY.items():
            if plan == content:
                self.trt.variant.logger.lines.append((1, line))
                return None
        return FakeEngine(self.trt, json.loads(plan))


class FakeCache:
    """A runtime cache."""

    def __init__(self):
        self.held = b""

    def deserialize(self, blob):
        self.held = bytes(blob)
        return True

    def serialize(self):
        return b"kernels" + self.held


class FakeConfig:
    def __init__(self):
        self.strategy, self.cuda_graph_strategy, self.cache = None, GraphStrategy.DISABLED, None
        self.dynamic_shapes_kernel_specialization_strategy = KernelStrategy.LAZY

    def set_execution_context_allocation_strategy(self, strategy):
        self.strategy = strategy

    def create_runtime_cache(self):
        return FakeCache()

    def set_runtime_cache(self, cache):
        self.cache = cache
        return True


def open_session(graph):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


class MadeUp:
    """A session without a graph, whose outputs pass the checks of a build: even distributions, one draft accepted."""

    def __init__(self, spec):
        self.spec = spec

    def get_inputs(self):
        return self.spec.inputs

    def get_outputs(self):
        return self.spec.outputs

    def run(self, names, feeds):
        return [self._value(self.spec.output(name)) for name in names]

    def _value(self, tensor):
        width = tensor.dims[-1] if isinstance(tensor.dims[-1], int) else 1
        if tensor.dtype.startswith("int"):
            return np.ones(1, np.int64) if tensor.name == specs.NUM_ACCEPTED else np.arange(width)
        return np.float32(1 / width)


class FakeEngine:
    """An engine whose spec is TensorRT's and whose graph is ONNX Runtime's."""

    def __init__(self, trt, record):
        self.trt, self.cuda = trt, trt.cuda
        self.spec = spec_from_json(record.get("told", record["spec"]))
        self.profiles = record["profiles"]
        self.num_optimization_profiles = len(self.profiles)
        self.tensors = {t.name: t for t in (*self.spec.inputs, *self.spec.outputs)}
        self.inputs = {t.name for t in self.spec.inputs}
        self.num_io_tensors = len(self.tensors)
        self.streamable_weights_size = record.get("streamable_bytes", 0)
        self.weight_streaming_budget_v2 = self.streamable_weights_size
        self.session = open_session(record["graph"]) if record["graph"] else MadeUp(self.spec)
        self.config = None

    @property
    def device_memory_size_v2(self):
        return 4096 + 1024 * (self.weight_streaming_budget_v2 < self.streamable_weights_size)

    def get_weight_streaming_automatic_budget(self):
        assert self.streamable_weights_size, "built without weight streaming"
        return self.streamable_weights_size // 2

    def get_tensor_name(self, index):
        return list(self.tensors)[index]

    def get_tensor_mode(self, name):
        return Mode.INPUT if name in self.inputs else Mode.OUTPUT

    def get_tensor_dtype(self, name):
        return DataType[NUMPY[self.tensors[name].dtype][0]]

    def get_tensor_location(self, name):
        return Location.DEVICE

    def get_tensor_shape(self, name):
        return [-1 if isinstance(d, str) else d for d in self.tensors[name].dims]

    def get_tensor_profile_shape(self, name, index):
        bounds = [(d, d) if isinstance(d, int) else self.profiles[index][d] for d in self.tensors[name].dims]
        low, high = [a for a, _ in bounds], [b for _, b in bounds]
        return [low, low, high]

    def create_runtime_config(self):
        self.config = FakeConfig()
        return self.config

    def create_execution_context(self, how):
        strategy = how.strategy if isinstance(how, FakeConfig) else how
        assert strategy is Strategy.USER_MANAGED
        context = FakeContext(self)
        self.trt.contexts.append(context)
        return context


class FakeContext:
    """An execution context; see the module."""

    def __init__(self, engine):
        self.engine, self.cuda = engine, engine.cuda
        self.profile = None
        self.shapes, self.addresses = {}, {}
        self.version = 0  # counts changes; a graph may only be replayed on the state it was captured in
        self.num_enqueued = 0

    def set_device_memory(self, address, size):
        assert size >= self.engine.device_memory_size_v2 and self.cuda.place_of(address, size) == "device"

    def set_optimization_profile_async(self, index, stream):
        assert stream == 7
        self.profile = self.engine.profiles[index]
        return True

    def set_input_shape(self, name, shape):
        tensor = self.engine.tensors[name]
        assert name in self.engine.inputs and self.profile is not None and len(shape) == len(tensor.dims)
        for size, dim in zip(shape, tensor.dims, strict=True):
            low, high = (dim, dim) if isinstance(dim, int) else self.profile[dim]
            if not low <= size <= high:
                return False
        self.version += self.shapes.get(name) != tuple(shape)
        self.shapes[name] = tuple(shape)
        return True

    def _sizes(self):
        sizes = {}
        for name, shape in self.shapes.items():
            for dim, size in zip(self.engine.tensors[name].dims, shape, strict=True):
                if isinstance(dim, str):
                    assert sizes.setdefault(dim, size) == size, f"{name}: {dim} is {size} and {sizes[dim]}"
        return sizes

    def infer_shapes(self):
        return sorted(self.engine.inputs - self.shapes.keys())

    def get_tensor_shape(self, name):
        if name in self.shapes:
            return self.shapes[name]
        sizes = self._sizes()
        sizes.setdefault("draft_vocab", self.engine.spec.vocab_size)  # of an output: its graph decides
        sizes.setdefault(NEXT_STATES, sizes.get("nodes", 0) + 1)
        return [sizes[d] if isinstance(d, str) else d for d in self.engine.tensors[name].dims]

    def set_tensor_address(self, name, address):
        assert name in self.engine.tensors and address % ALIGNMENT == 0, f"{name} at {address:#x}"
        self.version += self.addresses.get(name) != address
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream):
        assert stream == 7 and self.engine.inputs == self.shapes.keys(), "shapes are missing"
        assert self.engine.tensors.keys() == self.addresses.keys(), "addresses are missing"
        if self.cuda.captured is not None:
            assert self.num_enqueued, "TensorRT wants one run before a capture"
        self.num_enqueued += 1
        self._check_overlaps()
        version = self.version

        def work():
            assert self.version == version, "the context has changed since this was enqueued or captured"
            self._execute()

        self.cuda.submit(work)
        return True

    def _check_overlaps(self):
        caches = set()
        for cache in self.engine.spec.caches:
            names = [cache, updated_cache_name(cache), compacted_cache_name(cache)]
            assert len({self.addresses[n] for n in names if n in self.addresses}) == 1, f"{cache} is not in place"
            caches.update(names[1:])
        ends = sorted((self.addresses[n], self._num_bytes(n), n) for n in self.engine.tensors if n not in caches)
        for (start, size, name), (following, _, other) in pairwise(ends):
            assert start + size <= following, f"{name} and {other} overlap"

    def _num_bytes(self, name):
        dtype = NUMPY[self.engine.tensors[name].dtype][1]
        return int(np.prod(self.get_tensor_shape(name), dtype=np.int64)) * np.dtype(dtype).itemsize

    def _view(self, name):
        return self.cuda.view(
            self.addresses[name], self.get_tensor_shape(name), NUMPY[self.engine.tensors[name].dtype][1]
        )

    def _execute(self):
        spec = self.engine.spec
        knows_rows = specs.KV_ROWS in {t.name for t in self.engine.session.get_inputs()}  # a graph lowered for TensorRT
        rows = self.shapes[specs.KV_ROWS][0] if specs.KV_ROWS in self.shapes and not knows_rows else None
        feeds = {}
        for tensor in spec.inputs:
            array = self._view(tensor.name)
            if tensor.name in spec.caches:
                feeds[tensor.name] = np.ascontiguousarray(array[:, :, :rows], np.float32)
            elif tensor.name != specs.KV_ROWS or knows_rows:
                half = tensor.dtype in ("float16", "bfloat16")
                feeds[tensor.name] = array.astype(np.float32) if half else array.copy()
        names = [t.name for t in self.engine.session.get_outputs()]
        results = dict(zip(names, self.engine.session.run(names, feeds), strict=True))
        for tensor in spec.outputs:
            cache = next((c for c in spec.caches if tensor.name == compacted_cache_name(c)), None)
            view = self._view(tensor.name)
            if cache is not None:
                view[:] = kv_rollback(view, feeds[specs.LENGTHS], results[specs.PATH])[0]
            elif tensor.name in {updated_cache_name(c) for c in spec.caches}:
                view[:, :, :rows] = results[tensor.name]
            else:
                view[...] = np.broadcast_to(
                    results[tensor.name], view.shape
                )  # a distribution of width one: see the sampler
