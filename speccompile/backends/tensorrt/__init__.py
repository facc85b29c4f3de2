# SPDX-License-Identifier: Apache-2.0
"""TensorRT in two variants: plans, plugins, engines on an NVIDIA GPU."""
