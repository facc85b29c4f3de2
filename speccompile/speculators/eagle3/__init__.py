# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3: a decoder layer on fused features of three target layers, with a draft vocabulary of its own."""
