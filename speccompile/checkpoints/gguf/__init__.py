# SPDX-License-Identifier: Apache-2.0
"""GGUF files as checkpoints: container, blocks, config, tensors and tokenizer; no torch."""
