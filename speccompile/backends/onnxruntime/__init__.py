# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime: lowering, tuning, engine."""
