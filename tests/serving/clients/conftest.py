# SPDX-License-Identifier: Apache-2.0
"""Tests with real clients. They belong to `make test-clients`, which installs these and names the server's program in
the environment; elsewhere they are not collected.
"""

import os
from pathlib import Path

import pytest

from tests.serving.live_server import CHAT_TEMPLATE, bundle_with_template, live_process

PROGRAM = os.environ.get("SPECCOMPILE_PROGRAM")
collect_ignore_glob = [] if PROGRAM else ["test_*.py"]
# Tools by their names, calls as Hermes writes them.
CALLS = "{% for call in message.tool_calls or [] %} {{ call.function | tojson }}{% endfor %}"
TEMPLATE = (
    "{% for tool in tools or [] %}# tool: {{ tool.function.name }}\n{% endfor %}{# <tool_call> #}"
    # jinja drops the line end after a block
    + CHAT_TEMPLATE.replace("{{ message.content }}\n", f"{{{{ message.content }}}}{CALLS}{{{{ '\\n' }}}}")
)


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """Returns a server of the example pair that knows tools."""
    source = Path(__file__).parents[3] / "bundles/pycode"
    bundle = bundle_with_template(source, tmp_path_factory.mktemp("bundle") / "pycode", TEMPLATE)
    with live_process(PROGRAM, "serve", str(bundle), "--port", "0") as live:
        yield live
        assert live.stop() == 0, "".join(live.lines)


@pytest.fixture(scope="session")
def base_url(server):
    return f"{server.url}/v1"


@pytest.fixture(autouse=True)
def keys(monkeypatch):
    """Clients look for keys in the environment, and some report to their makers."""
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(name, "none")
    for name, value in {
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "LANGCHAIN_TRACING_V2": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "true",
    }.items():
        monkeypatch.setenv(name, value)
