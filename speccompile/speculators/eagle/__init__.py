# SPDX-License-Identifier: Apache-2.0
"""EAGLE-1 and 2: a decoder layer that drafts features of the target."""
