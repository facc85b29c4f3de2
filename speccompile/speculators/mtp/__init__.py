# SPDX-License-Identifier: Apache-2.0
"""MTP: a multi-token prediction module of the target, one decoder layer over its last hidden state."""
