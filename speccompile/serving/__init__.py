# SPDX-License-Identifier: Apache-2.0
"""Servers around a bundle. Each one has a folder or module of its own, and its packages come with an extra."""
