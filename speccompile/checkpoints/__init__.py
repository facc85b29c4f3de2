# SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders: configs, safetensors, model families; no torch."""
