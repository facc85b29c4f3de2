# SPDX-License-Identifier: Apache-2.0
"""Training of speculators: text, the frozen target's outputs, two stages, checkpoints, plots."""
