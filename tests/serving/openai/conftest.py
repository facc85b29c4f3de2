# SPDX-License-Identifier: Apache-2.0
"""A server whose model may call tools, for the tests of chats, responses and messages."""

import pytest

from speccompile.serving.openai.server import ServerOptions
from tests.lab.servers import chat_server


@pytest.fixture(scope="package")
def served():
    from tests.runtime.test_structured_text import make_engine
    from tests.serving.openai.test_tools import TEMPLATE

    options = ServerOptions("mock", tool_call_parser="hermes", request_metrics=True, vllm_metrics=True)
    with chat_server(make_engine("draft chain"), TEMPLATE, options) as served:
        yield served


@pytest.fixture
def app(served):
    return served[0]


@pytest.fixture
def server(served):
    return served[1]
