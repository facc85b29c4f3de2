# SPDX-License-Identifier: Apache-2.0
"""Nothing here asks the hub: a mutated path may look like an id."""

import pytest

pytestmark = pytest.mark.fuzz


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise OSError("the tests ask no hub")

    huggingface_hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
