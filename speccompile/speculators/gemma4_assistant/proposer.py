# SPDX-License-Identifier: Apache-2.0
"""Drafts of one run that also reads the target's caches: how many of their rows each slot may read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from speccompile.core.protocols import Outputs, TokenSequence
from speccompile.core.specs import TARGET_LENGTHS
from speccompile.drafting.heads import HeadsProposer


class AssistantProposer(HeadsProposer):
    """See `HeadsProposer`. While drafts are made the target has read the tokens before the root, and no more."""

    def feeds_of(self, sequences: Sequence[TokenSequence]) -> Outputs:
        lengths = [
            max(len(sequence.tokens) - 1, 1) for sequence in sequences
        ]  # without a row there is no state, and no draft
        return {TARGET_LENGTHS: np.array(lengths, dtype=np.int64)}
