# SPDX-License-Identifier: Apache-2.0
"""Which prompts are decoded by the checks."""

import pytest

from speccompile.certificate.prompts import find_prompts
from speccompile.errors import RuntimeFault
from tests.certificate.certificate_lab import MAX_SEQ, make_engine


def test_given_prompts_are_all_used():
    long = [k % 7 for k in range(MAX_SEQ)]
    assert find_prompts(make_engine(), [[3, 1], long]) == [[3, 1], long[-(MAX_SEQ // 3) :]]


@pytest.mark.parametrize("given", [[[3]], [[3, 1, 4], [5]], [[3, 1, 4], []]])
def test_a_given_prompt_too_short_to_check_is_refused(given):
    with pytest.raises(RuntimeFault) as caught:
        find_prompts(make_engine(), given)
    assert caught.value.where == f"prompt {len(given)}" and caught.value.expected == "at least 2 tokens"
    assert caught.value.got == ("1 token" if given[-1] else "0 tokens")


def test_prompts_of_our_own_have_two_tokens_or_more():
    assert all(len(ids) >= 2 for ids in find_prompts(make_engine()))
