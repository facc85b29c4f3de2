# SPDX-License-Identifier: Apache-2.0
"""Medusa: heads on the target's hidden state that each guess one token further ahead."""
