# SPDX-License-Identifier: Apache-2.0
"""Paths that grammars read hold what a draft tree has, and nothing else."""

from types import SimpleNamespace

import numpy as np

from speccompile.drafting.grammars import NO_TOKEN, paths_after
from speccompile.drafting.tree import DraftTrees


def test_a_refused_candidate_has_no_path():
    trees = DraftTrees([7], 2)
    trees.add(np.array([[0]]), np.array([[[5, NO_TOKEN]]]), np.array([[[0.6, 0.0]]]), 2)
    batch = SimpleNamespace(sequences=[SimpleNamespace(grammar=object())])
    assert paths_after(batch, trees, np.array([[0, 1, 2, -1]])) == [[[], [5], None, None]]
