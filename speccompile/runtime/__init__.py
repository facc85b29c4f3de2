# SPDX-License-Identifier: Apache-2.0
"""The decoding runtime: numpy, engine handles and a tokenizer; no torch, no onnx, no transformers."""
