# SPDX-License-Identifier: Apache-2.0
"""The oracle: the ONNX reference evaluator with the numpy twins."""
