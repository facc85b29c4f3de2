# SPDX-License-Identifier: Apache-2.0
"""Methods that find drafts in the text say so: the certificate gives them texts that repeat."""

import pytest

from speccompile.core.jobs import MethodContext
from speccompile.core.registry import method
from speccompile.drafting.proposer import looks_up

LOOKUPS = [{"method": "ngram"}, {"method": "suffix"}]


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("ngram", {}, True),
        ("suffix", {}, True),
        ("suffix", {"tree": "auto"}, True),
        ("hybrid", {"drafters": LOOKUPS}, True),
        ("none", {}, False),
    ],
)
def test_methods_say_whether_they_find_drafts_in_the_text(name, fields, expected):
    made = method(name)
    proposer = made.make_proposer(made.Config(**fields), {}, MethodContext(2, 512, 15, {}))
    assert looks_up(proposer) is expected
