# SPDX-License-Identifier: Apache-2.0
"""Plain decoding: the method that never drafts."""
