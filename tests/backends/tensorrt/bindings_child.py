# SPDX-License-Identifier: Apache-2.0
"""Full TensorRT's real bindings over stub libraries: what of the backend runs without a library is run.

    python -m tests.backends.tensorrt.bindings_child FOLDER

FOLDER holds the stubs. Prints a JSON object; its "missing" are names that the backend's sources ask of the module and
that it does not have.
"""

import ast
import ctypes
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from speccompile.backends import tensorrt as package

STUBS = ("libnvinfer.so.11", "libnvinfer_plugin.so.11", "libnvonnxparser.so.11")


def chains(tree: ast.AST) -> Iterator[tuple[str, ...]]:
    """Yields ("BuilderFlag", "TF32") for every `trt.BuilderFlag.TF32` and `variant.trt.BuilderFlag.TF32`."""
    for node in ast.walk(tree):
        names: list[str] = []
        while isinstance(node, ast.Attribute) and node.attr != "trt":
            names.append(node.attr)
            node = node.value
        if names and (getattr(node, "id", None) == "trt" or getattr(node, "attr", None) == "trt"):
            yield tuple(reversed(names))


def main() -> None:
    for name in STUBS:
        ctypes.CDLL(str(Path(sys.argv[1]) / name), ctypes.RTLD_GLOBAL)
    import tensorrt_bindings

    sys.modules["tensorrt"] = tensorrt_bindings
    from speccompile.backends.tensorrt import build_child, import_helper, plugins

    variant = import_helper.load_tensorrt("tensorrt")
    trt, missing = variant.trt, set()
    for path in Path(package.__file__).parent.glob("*.py"):
        for chain in chains(ast.parse(path.read_text(encoding="utf-8"))):
            held = trt
            for name in chain:
                if not hasattr(held, name):
                    missing.add(".".join(chain))
                    break
                held = getattr(held, name)
    variant.logger.log(trt.ILogger.Severity.WARNING, "a line")
    file, events = io.BytesIO(), []
    writer = build_child.make_writer(trt, file)
    num = writer.write(b"plan")
    monitor = build_child.make_monitor(trt, events.append)
    monitor.phase_start("phase", None, 2)
    monitor.step_complete("phase", 0)
    creators: dict[str, Any] = {}
    registry = SimpleNamespace(
        register_creator=lambda creator, space: creators.update({f"{space}::{creator.name}": creator}),
        get_creator=lambda name, version, space: creators[f"{space}::{name}"],
    )
    trt.get_plugin_registry = lambda: registry  # the stubs have none
    answer = {
        "version": trt.__version__,
        "missing": sorted(missing),
        "creators": sorted(plugins._creators(trt)),
        "lines": list(variant.logger.lines),
        "written": [num, file.getvalue().decode()],
        "events": len(events),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
