# SPDX-License-Identifier: Apache-2.0
"""Fields of a recipe's `speculator` that no draft can have are refused by name."""

import pytest

from speccompile.core import registry
from speccompile.errors import RecipeError

DRAFTED = [{"num_draft_tokens": 0}, {"drafts": "beam"}, {"min_confidence": 1.0}, {"confidence_odds": 0}]
SUFFIX = [{"depth": 1}, {"min_match": 24}, {"min_prob": 0}, {"tree": "wide"}, {"max_bytes": 5}, {"shared_bytes": 5}]
BAD = {
    "draft_model": DRAFTED,
    "mlp": DRAFTED,
    "medusa": [{"num_heads": 0}, {"confidence_odds": 0}, {"tree": "bush"}],
    "prophet": [{"max_draft_tokens": 0}, {"drafts": "beam"}, {"tree": "bush"}],
    "ngram": [{"num_draft_tokens": 0}, {"min_match": 0}, {"min_match": 4, "max_match": 3}],
    "suffix": SUFFIX,
}


@pytest.mark.parametrize(("name", "bad"), [(name, bad) for name, rows in BAD.items() for bad in rows])
def test_bad_fields_are_refused(name, bad):
    model = {} if name in ("ngram", "suffix") else {"model": "m"}
    with pytest.raises(RecipeError, match=rf"speculator\.{list(bad)[-1]}: got"):
        registry.method(name).Config(**model, **bad)
