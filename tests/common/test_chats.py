# SPDX-License-Identifier: Apache-2.0
"""The conversations of the package: of all kinds from the first lines on, each waiting for an answer."""

from collections import Counter

from speccompile.common.chats import read_chats

KINDS = ("code", "dialogue", "maths", "rewriting", "languages")


def test_each_conversation_is_there_once_and_waits_for_an_answer():
    chats = read_chats()
    assert len({chat.messages[-1]["content"] for chat in chats}) == len(chats) == 80
    for chat in chats:
        roles = [message["role"] for message in chat.messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
        assert all(message["content"].strip() and set(message) == {"role", "content"} for message in chat.messages)
    assert any(len(chat.messages) > 1 for chat in chats)


def test_the_kinds_take_turns():
    chats = read_chats()
    assert [chat.category for chat in chats] == list(KINDS) * 16
    assert Counter(chat.category for chat in chats[:20]) == dict.fromkeys(KINDS, 4)
