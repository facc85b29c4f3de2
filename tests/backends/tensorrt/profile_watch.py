# SPDX-License-Identifier: Apache-2.0
"""Steps of another backend's engine, compared with the profiles that TensorRT's plan of the same graph would have."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from speccompile.backends.cuda.steps import Profile
from speccompile.backends.feeds import bucket_rows, shape_from_dims, sizes_from_feeds
from speccompile.backends.tensorrt.profiles import make_profiles
from speccompile.backends.tensorrt.specs import tensorrt_spec
from speccompile.core import specs
from speccompile.core.jobs import CompileOptions
from speccompile.core.specs import GraphSpec


class ProfileWatch:
    """Records the shapes of an engine's steps, and those that no profile accepts; its `run` replaces the engine's.

    Args:
        engine: that runs the steps.
        max_slots, max_nodes: of the build with the profiles.
    """

    def __init__(self, engine: Any, max_slots: int, max_nodes: int) -> None:
        self._run, spec = engine.run, engine.spec
        self.max_rows = -(-engine.max_rows // 8) * 8 if spec.caches else 0
        self.plan_spec: GraphSpec = tensorrt_spec(spec, "float16", self.max_rows)
        options = CompileOptions("float16", max_slots, self.max_rows, max_nodes)
        self.profiles = []
        for index, profile in enumerate(make_profiles(self.plan_spec, options)):
            ends = [{dim: sizes[end] for dim, sizes in profile.sizes.items()} for end in (0, 2)]
            inputs = self.plan_spec.inputs
            bounds = {t.name: (shape_from_dims(t, ends[0]), shape_from_dims(t, ends[1])) for t in inputs}
            self.profiles.append(Profile(index, bounds))
        self.shapes: set[tuple[tuple[str, int], ...]] = set()
        self.faults: list[str] = []

    def run(self, feeds: Mapping[str, Any], first_slot: int = 0) -> Mapping[str, Any]:
        """See `speccompile.core.protocols.Engine.run`."""
        sizes = sizes_from_feeds(self.plan_spec, feeds)
        if any(t.name == specs.KV_ROWS for t in self.plan_spec.inputs):
            rows = int(np.max(feeds[specs.LENGTHS])) + sizes["nodes"] + self.plan_spec.rows_written_ahead
            sizes["kv"] = bucket_rows(rows, self.max_rows)
        shapes = {t.name: shape_from_dims(t, sizes) for t in self.plan_spec.inputs}
        faults = [profile.find_fault(shapes) for profile in self.profiles]
        if all(faults):
            self.faults.append(f"{self.plan_spec.name}: {faults[-1]}")
        self.shapes.add(tuple(sizes.items()))
        return self._run(feeds, first_slot)
