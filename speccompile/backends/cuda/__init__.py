# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the GPU backends: device, arrays, caches, steps."""
