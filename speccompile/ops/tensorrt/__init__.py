# SPDX-License-Identifier: Apache-2.0
"""Bodies for TensorRT plans without plugins: standard ops in float32 and int64, no branch, no loop, no sorting."""
