# SPDX-License-Identifier: Apache-2.0
"""Speculation methods, one folder each: config, method, proposer. Methods do not know each other."""
