# SPDX-License-Identifier: Apache-2.0
"""Rewrites of the graph: one pass is one file, a backend is one table of passes."""
