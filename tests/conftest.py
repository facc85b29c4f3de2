# SPDX-License-Identifier: Apache-2.0
"""The bundle of the trained example pair: built once a session, through the whole pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def e2e_folder(tmp_path_factory) -> Path:
    pytest.importorskip("torch")
    pytest.importorskip("onnxruntime")
    return tmp_path_factory.mktemp("e2e")


@pytest.fixture(scope="session")
def pair(e2e_folder) -> Path:
    """The trained example pair in fp32."""
    from tests.e2e.conftest import build_bundle, pair_recipe

    return build_bundle(e2e_folder, "pair", pair_recipe("none"))
