# SPDX-License-Identifier: Apache-2.0
"""What methods share at decode time: scorers, trees, how far to draft; imports numpy alone."""
