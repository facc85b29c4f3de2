# SPDX-License-Identifier: Apache-2.0
"""Bundles behind Triton Inference Server: what is written for it, and the backend that it then runs."""
