# SPDX-License-Identifier: Apache-2.0
"""DFlash and its relatives: drafters that give a block of tokens in one run, over the target's states."""
