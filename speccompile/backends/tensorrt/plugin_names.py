# SPDX-License-Identifier: Apache-2.0
"""How the two plugins are found by TensorRT, and what a build must set for them.

Parser: `OnnxParserFlag.ENABLE_PLUGIN_OVERRIDE`, or a function body beats the plugin. Builder config:
`PreviewFeature.ALIASED_PLUGIN_IO_10_03`, or KVRollback's outputs that alias its inputs are refused. The plugins are
registered before a model is parsed and before a plan is deserialised: a node that is not resolved ends the process.
KVRollback follows TensorScatter, and its caches before and behind it are network outputs bound to one address.

The namespace is empty because the override looks for plugins there only (TensorRT-RTX 1.7.1: one registered under the
node's domain is found for a node without body, but loses against a body).
"""

PLUGIN_NAMESPACE = ""
PLUGIN_VERSION = "1"

SPEC_VERIFY = "SpecVerify"
KV_ROLLBACK = "KVRollback"
PLUGIN_OPS = (SPEC_VERIFY, KV_ROLLBACK)

# Node attribute of KVRollback: TensorRT asks for the number of outputs before it shows the inputs. 1 when left out.
NUM_CACHES = "num_caches"

# Plugin field of both ops that a plan carries. It counts changes of what a plan relies on: inputs, outputs, workspace.
ABI_FIELD = "abi"
PLUGIN_ABI = 1
