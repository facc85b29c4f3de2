# SPDX-License-Identifier: Apache-2.0
"""Builds plans again in a process of its own, whose logger keeps every line: python -m ...gates_child < requests.json.

A request is `BuildRequest.json_from_request`; answers, a list of {"built", "lines", "shape"}: whether a plan was made,
the verbose log, and inputs or outputs that are read as shapes, which are in host memory.
"""

import json
import sys
from pathlib import Path
from typing import Any

from speccompile.backends.tensorrt import import_helper, network
from speccompile.backends.tensorrt.plugins import register_plugins


def answer(request: dict[str, Any], lines: list[str]) -> dict[str, Any]:
    """Builds one plan that may allocate nothing itself when it runs."""
    variant, settings = import_helper.load_tensorrt(request["variant"]), request["settings"]
    lines.clear()
    trt = variant.trt
    register_plugins(trt)
    builder = trt.Builder(variant.logger)
    parsed, parser = network.parse_network(variant, builder, Path(request["onnx"]), settings["plugins"])
    config = network.configure(variant, builder, settings)
    config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    ends = [parsed.get_input(i) for i in range(parsed.num_inputs)]
    ends += [parsed.get_output(i) for i in range(parsed.num_outputs)]
    plan = builder.build_serialized_network(parsed, config)
    del parser
    return {"built": plan is not None, "lines": list(lines), "shape": [t.name for t in ends if t.is_shape_tensor]}


def main() -> None:
    lines: list[str] = []
    make_logger = import_helper.make_logger

    def make(trt: Any) -> Any:
        """A logger that keeps verbose lines too."""
        made = make_logger(trt)
        kind = type("EveryLine", (type(made),), {"log": lambda self, severity, message: lines.append(message)})
        return kind()

    import_helper.make_logger = make
    print(json.dumps([answer(request, lines) for request in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
