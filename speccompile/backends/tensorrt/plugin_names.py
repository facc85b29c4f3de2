# SPDX-License-Identifier: Apache-2.0
"""Names by which TensorRT finds the two plugins, and the settings that a build needs for them.

`OnnxParserFlag.ENABLE_PLUGIN_OVERRIDE`: else function bodies take precedence. `PreviewFeature.ALIASED_PLUGIN_IO_10_03`:
else KVRollback's outputs that alias its inputs are refused. Plugins are registered before a model is parsed and a plan
deserialised: a node that is not resolved ends the process. The caches before and after KVRollback are network outputs
bound to one address. The namespace is empty because the override looks nowhere else (TensorRT-RTX 1.7.1).
"""

PLUGIN_NAMESPACE = ""
PLUGIN_VERSION = "1"

SPEC_VERIFY = "SpecVerify"
KV_ROLLBACK = "KVRollback"
PLUGIN_OPS = (SPEC_VERIFY, KV_ROLLBACK)

# Node attribute of KVRollback: TensorRT asks for the number of outputs before it passes the inputs. Default 1.
NUM_CACHES = "num_caches"

# Plugin field of both ops, stored in a plan. It is incremented when inputs, outputs or workspace change.
ABI_FIELD = "abi"
PLUGIN_ABI = 1
