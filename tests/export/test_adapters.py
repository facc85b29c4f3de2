# SPDX-License-Identifier: Apache-2.0
"""Methods are replaced in the modules that need it, in the form that the installed transformers has."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from speccompile.export.adapted_models import ADAPTERS  # noqa: E402
from speccompile.export.adapters import adapt_model, is_adapted  # noqa: E402


def layer(name: str, **attributes: object) -> object:
    module = type(name, (torch.nn.Module,), {"forward": lambda self, hidden: hidden})()
    for key, value in attributes.items():
        setattr(module, key, value)
    return module


@pytest.mark.parametrize("model_type", ["gptj", "codegen"])
def test_modules_that_take_attention_from_the_registry_keep_their_method(model_type):
    (adapter,) = ADAPTERS[model_type]
    assert adapter.form == "scale_attn" and is_adapted(model_type)
    old, new = layer(adapter.module, scale_attn=2.0), layer(adapter.module, scaling=0.5)
    model = torch.nn.ModuleList([old, new])
    model.config = SimpleNamespace(model_type=model_type, _attn_implementation="eager")
    adapt_model(model)
    assert "forward" in vars(old) and "forward" not in vars(new)
    assert (old.layer_idx, new.layer_idx) == (0, 1)


def test_adapters_without_a_form_are_for_all():
    (adapter,) = ADAPTERS["bloom"]
    model = torch.nn.ModuleList([layer(adapter.module)])
    model.config = SimpleNamespace(model_type="bloom", _attn_implementation="eager")
    adapt_model(model)
    assert "forward" in vars(model[0])
