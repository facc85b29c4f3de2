# SPDX-License-Identifier: Apache-2.0
"""Backends on devices: a backend that works in another way on another device says so with `for_device`."""

from __future__ import annotations

from typing import Any

from speccompile.core import registry


def backend_on(name: str, device: str) -> Any:
    """The backend of that name for a device.

    Raises:
        RecipeError: there is no such backend.
    """
    backend = registry.backend(name)
    choose = getattr(backend, "for_device", None)
    return backend if choose is None else choose(device)
