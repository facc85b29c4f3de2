# SPDX-License-Identifier: Apache-2.0
"""Medusa: heads on the target's hidden state that each candidate one token further ahead."""
