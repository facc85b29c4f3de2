# SPDX-License-Identifier: Apache-2.0
"""Self-speculation without training: the target's own weights on a coarser grid draft."""
