# SPDX-License-Identifier: Apache-2.0
"""Finds the faults of a checkpoint and converts it; no torch."""
