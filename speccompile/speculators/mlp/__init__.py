# SPDX-License-Identifier: Apache-2.0
"""IBM's hierarchical multi-stage MLP speculator: a stack of heads, each behind the token of the one before."""
