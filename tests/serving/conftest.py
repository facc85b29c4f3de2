# SPDX-License-Identifier: Apache-2.0
"""One server of the example pair for all tests that do not end it."""

import pytest

from tests.serving.live_server import bundle_with_template, live_server


@pytest.fixture(scope="session")
def chat_bundle(pair, tmp_path_factory):
    """Returns the example pair with a chat template."""
    return bundle_with_template(pair, tmp_path_factory.mktemp("chat") / "pycode-chat")


@pytest.fixture(scope="session")
def live(chat_bundle):
    with live_server(chat_bundle) as server:
        yield server
        assert server.stop() == 0, "".join(server.lines)
