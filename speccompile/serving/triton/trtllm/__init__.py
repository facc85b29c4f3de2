# SPDX-License-Identifier: Apache-2.0
"""The layout `trtllm`: the five models of the removed TensorRT-LLM backend, by their names, tensors and rules."""
