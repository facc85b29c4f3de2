# SPDX-License-Identifier: Apache-2.0
"""A page that shows a generation while it is made: kinds of tokens, the tree of each step, acceptance, speed."""
