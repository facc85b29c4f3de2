# SPDX-License-Identifier: Apache-2.0
"""Drafts by a small language model that shares the target's vocabulary."""
