# SPDX-License-Identifier: Apache-2.0
"""Custom ops of the domain "speccompile": signature in named dims, numpy twin and ONNX function body of each."""
