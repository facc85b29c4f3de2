# SPDX-License-Identifier: Apache-2.0
"""Kinds of draft graphs that several methods declare: heads, drafts that read features, graphs on shared caches."""
