# SPDX-License-Identifier: Apache-2.0
"""Names by which TensorRT finds the two plugins, and the settings that a build needs for them.

Parser: `OnnxParserFlag.ENABLE_PLUGIN_OVERRIDE`, else function bodies take precedence. Builder config:
`PreviewFeature.ALIASED_PLUGIN_IO_10_03`, else KVRollback's outputs that alias its inputs are refused. The plugins are
registered before a model is parsed and before a plan is deserialised: a node that is not resolved ends the process.
KVRollback follows TensorScatter, and the caches before and after it are network outputs bound to one address.

The namespace is empty because the override looks for plugins there only (TensorRT-RTX 1.7.1: one registered under the
node's domain is found for a node without body, but a body takes precedence).
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
