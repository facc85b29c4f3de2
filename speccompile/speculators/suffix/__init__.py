# SPDX-License-Identifier: Apache-2.0
"""Drafts from a tree that counts which tokens followed each run of tokens of the sequence."""
