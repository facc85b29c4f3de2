# SPDX-License-Identifier: Apache-2.0
"""GLIDE: a small decoder whose cross-attention reads the target's cache."""
