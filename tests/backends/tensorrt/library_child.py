# SPDX-License-Identifier: Apache-2.0
"""Loads the C++ plugin library into TensorRT-RTX and builds with it; a process of its own keeps the registry clean.

python -m tests.backends.tensorrt.library_child LIBRARY
"""

import json
import sys
from pathlib import Path

from speccompile.backends.tensorrt import plugins
from speccompile.backends.tensorrt.import_helper import load_tensorrt
from speccompile.backends.tensorrt.plugin_names import PLUGIN_OPS
from tests.backends.tensorrt import plugin_graphs as graphs


def main() -> None:
    library = Path(sys.argv[1])
    variant = load_tensorrt("tensorrt_rtx")
    plugins.load_plugin_library(variant.trt, library)
    before = len(variant.trt.get_plugin_registry().all_creators)
    plugins.register_plugins(variant.trt)  # the library's creators stay
    said = {"registered": len(variant.trt.get_plugin_registry().all_creators) - before}
    said["plugins"] = graphs.plugins_in(variant.trt, graphs.parse(variant, graphs.step_model("float16"))[1])
    for name, model in {
        "float16": graphs.step_model("float16"),
        "bfloat16": graphs.step_model("bfloat16"),
        "map": graphs.step_model("float32", 0, has_map=True),
    }.items():
        plan = graphs.build(variant, model)
        said[name] = 0 if plan is None else len(plan)
    embedded = graphs.build(variant, graphs.step_model("float16"), embed=[str(library)])
    said["embedded"] = 0 if embedded is None else len(embedded)
    said["ops"] = [op for op in PLUGIN_OPS if embedded is not None and op.encode() in embedded]
    said["wrong"] = graphs.parse(variant, graphs.step_model("float16", 4, says_num_caches=False))[2] != []
    said["errors"] = [text for level, text in variant.logger.lines if level <= 1 and "KVRollback: got" in text]
    print(json.dumps(said))


if __name__ == "__main__":
    main()
