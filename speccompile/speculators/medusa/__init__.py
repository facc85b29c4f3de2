# SPDX-License-Identifier: Apache-2.0
"""Medusa: heads on the target's hidden state, each for the token at one distance ahead."""
