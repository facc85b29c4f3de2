# SPDX-License-Identifier: Apache-2.0
"""TensorRT in two flavours: plans, plugins, engines on an NVIDIA GPU."""
