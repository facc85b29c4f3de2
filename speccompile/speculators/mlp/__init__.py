# SPDX-License-Identifier: Apache-2.0
"""IBM's hierarchical multi-stage MLP speculator: a stack of heads, each of which reads the token of the one before."""
