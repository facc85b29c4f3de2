# SPDX-License-Identifier: Apache-2.0
"""Proof that a bundle decodes as its target does: checks of a loaded bundle, and the certificate of their results."""
