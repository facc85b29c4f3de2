# SPDX-License-Identifier: Apache-2.0
"""Bundles in Triton Inference Server: the model repository that is written, and the backend that Triton runs."""
