# SPDX-License-Identifier: Apache-2.0
"""Drafts by prompt lookup: what followed the same few tokens earlier in the sequence."""
