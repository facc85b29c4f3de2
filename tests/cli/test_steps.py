# SPDX-License-Identifier: Apache-2.0
"""How a step of a build is shown while it runs."""

import pytest

from speccompile.cli.output import text_from_step


@pytest.mark.parametrize(("message", "filled"), [("s: p 0/4", 0), ("s: p 1/4", 6), ("s: p 4/4", 24), ("s: p 5/4", 24)])
def test_a_share_is_a_bar(message, filled):
    text = text_from_step(message)
    assert text.plain == f"s: p {'━' * 24} {message.split()[-1]}"
    assert [span.end - span.start for span in text.spans if str(span.style) == "green"] == ([filled] if filled else [])


@pytest.mark.parametrize("message", ["export target", "compile target: merge_linears", "a: b/c", "x: 1/0", "done 3"])
def test_any_other_message_stays_as_it_is(message):
    assert text_from_step(message).plain == message
