# SPDX-License-Identifier: Apache-2.0
"""Gemma 4's assistants: small decoders without keys and values that read the target's."""
