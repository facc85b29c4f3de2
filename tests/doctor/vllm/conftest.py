# SPDX-License-Identifier: Apache-2.0
"""Tests with vLLM. They belong to `make test-vllm`, which installs it and names its interpreter in the environment;
elsewhere they are not collected.
"""

import os

import pytest

pytestmark = pytest.mark.live

collect_ignore_glob = [] if os.environ.get("SPECCOMPILE_VLLM") else ["test_*.py"]
