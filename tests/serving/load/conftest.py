# SPDX-License-Identifier: Apache-2.0
"""Tests with a load generator. They belong to `make test-load`, which installs it and names it in the environment;
elsewhere they are not collected.
"""

import os

import pytest

pytestmark = pytest.mark.live

collect_ignore_glob = [] if os.environ.get("SPECCOMPILE_GUIDELLM") else ["test_*.py"]
