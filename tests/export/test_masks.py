# SPDX-License-Identifier: Apache-2.0
"""The window of a layer is that of its mask; methods are replaced in the modules that need it."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils  # noqa: E402

from speccompile.errors import ExportError  # noqa: E402
from speccompile.export.attention import IMPLEMENTATION, register  # noqa: E402
from speccompile.export.masks import read_windows, refuse_faults, window_of  # noqa: E402
from tests.export.families import CONFIGS  # noqa: E402

ROWS = 40


def prefix_mask(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) | (key < 3)


def two_way_window(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (query - key).abs() < 6


def strided(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) & ((query - key < 4) | (key % 8 == 0))


@pytest.mark.parametrize("window", [1, 2, 5, 20, 39, 40, 41, 4096])
def test_a_window_is_read_from_its_mask(window):
    found = window_of(masking_utils.sliding_window_causal_mask_function(window), ROWS, "here")
    assert found == (window if window < ROWS else 0)


def test_a_causal_mask_has_no_window():
    assert window_of(masking_utils.causal_mask_function, ROWS, "here") == 0


@pytest.mark.parametrize("chunk", [1, 7, 8, 20, 39])
def test_chunked_attention_is_no_window(chunk):
    chunked = masking_utils.chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.int64))
    if chunk == 1:  # each row sees itself
        assert window_of(chunked, ROWS, "here") == 1
        return
    with pytest.raises(ExportError, match="no sliding window"):
        window_of(chunked, ROWS, "here")


@pytest.mark.parametrize("mask", [prefix_mask, two_way_window, strided, masking_utils.bidirectional_mask_function])
def test_other_masks_are_refused(mask):
    with pytest.raises(ExportError, match=r"here: got an attention mask that is no sliding window .*another target"):
        window_of(mask, ROWS, "here")


def tiny(model_type: str, **fields: Any) -> Any:
    register()
    config = AutoConfig.for_model(**{**CONFIGS["llama2"], **fields, "model_type": model_type})
    return AutoModelForCausalLM.from_config(config, attn_implementation=IMPLEMENTATION, dtype=torch.float32).eval()


def windows_of(model: Any) -> tuple[int, ...]:
    return read_windows(model, IMPLEMENTATION, 2, ROWS, "tiny")


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("llama", {}, (0, 0)),
        ("mistral", {"sliding_window": 12}, (12, 12)),
        ("mistral", {"sliding_window": ROWS}, (0, 0)),
        ("phimoe", {"sliding_window": 12, "num_local_experts": 2}, (12, 12)),
        ("phimoe", {"sliding_window": None, "num_local_experts": 2}, (0, 0)),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}, (0, 12)),
        (
            "qwen2_moe",
            {
                "use_sliding_window": True,
                "sliding_window": 12,
                "num_experts": 4,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (12, 0),
        ),
        ("qwen2_moe", {"use_sliding_window": False, "sliding_window": 12, "num_experts": 4}, (0, 0)),
    ],
)
def test_windows_of_models(model_type, fields, expected):
    model = tiny(model_type, **fields)
    assert windows_of(model) == expected
    assert model.config._attn_implementation == IMPLEMENTATION


def test_a_mask_that_the_model_changes_is_refused(monkeypatch):
    model = tiny("llama")
    attention = type(model.model.layers[0].self_attn)
    own = attention.forward

    def changed(self: Any, hidden_states: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return own(self, hidden_states, attention_mask=attention_mask * 2, **kwargs)

    monkeypatch.setattr(attention, "forward", changed)
    with pytest.raises(ExportError, match=r"tiny \(layer 0\): got an attention mask that the model itself made"):
        windows_of(model)


@pytest.mark.parametrize("fault", [KeyError("sliding_attention"), TypeError("a"), RuntimeError(""), IndexError("b")])
def test_what_a_model_raises_is_a_refusal(fault):
    words = f"tiny: got {type(fault).__name__} .* in its forward pass"
    with pytest.raises(ExportError, match=words) as caught, refuse_faults("tiny"):
        raise fault
    assert caught.value.__cause__ is fault
    assert caught.value.todo.endswith(".")


pytest.importorskip("transformers")

from speccompile.export.adapted_models import ADAPTERS, adapt_model, is_adapted  # noqa: E402


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
