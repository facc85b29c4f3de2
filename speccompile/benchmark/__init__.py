# SPDX-License-Identifier: Apache-2.0
"""Measures greedy decoding at batch 1: plain against speculative decoding and against transformers, interleaved."""
