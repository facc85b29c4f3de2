# SPDX-License-Identifier: Apache-2.0
"""YAML -> Recipe (pydantic, unknown keys refused) -> frozen BuildPlan."""

from speccompile.recipe.loading import load_recipe
from speccompile.recipe.models import Recipe
from speccompile.recipe.plan import BuildPlan, Device, find_device, resolve

__all__ = ["BuildPlan", "Device", "Recipe", "find_device", "load_recipe", "resolve"]
