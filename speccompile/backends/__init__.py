# SPDX-License-Identifier: Apache-2.0
"""Backends: graphs in, engines out."""
