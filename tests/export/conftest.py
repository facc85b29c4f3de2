# SPDX-License-Identifier: Apache-2.0
"""One thread: the models are tiny, and threads that wait for each other are slow on a busy machine."""

from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.export


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
