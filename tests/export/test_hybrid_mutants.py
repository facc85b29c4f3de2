# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the layers of hybrids change logits, so the equality tests would notice each of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.export.harness import make_checkpoint
from tests.export.hybrids import HYBRIDS, VARIANTS

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from speccompile.checkpoints.checkpoint import read_dims  # noqa: E402
from speccompile.checkpoints.target_tables import read_tables  # noqa: E402
from speccompile.core.jobs import GraphJob, SourceContext  # noqa: E402
from speccompile.errors import ExportError  # noqa: E402
from speccompile.export import attention, decoder, delta_layers, mamba_layers  # noqa: E402
from speccompile.export.delta_layers import GroupedParts, QueryGate  # noqa: E402
from speccompile.export.layer_changes import replace_layers  # noqa: E402
from speccompile.export.weights import load_model  # noqa: E402
from speccompile.export.wrapper import DecoderGraph  # noqa: E402

Patch = pytest.MonkeyPatch
MAX_RELATIVE_DIFFERENCE = 1e-4  # as in the equality tests


FAMILIES = {**HYBRIDS, **VARIANTS}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """A checkpoint of each family, and transformers' model."""
    made = {name: tmp_path_factory.mktemp(name) for name in FAMILIES}
    return {name: (folder, make_checkpoint(FAMILIES[name], folder)) for name, folder in made.items()}


def difference(folder: Path, own: Any, change: Callable[[Any], None] = lambda model: None) -> float:
    """The largest difference from transformers' logits over the largest logit, of a prefill and steps after it."""
    dims = read_dims(folder)
    attention.register()
    model = load_model(folder, "checkpoint")
    replace_layers(model)
    change(model)
    tokens = (torch.arange(decoder.NUM_TOKENS) * 7 + 3).remainder(dims.vocab_size)[None]
    with torch.no_grad():
        ours = decoder._run_cached(DecoderGraph(model, dims, False, (), (0,) * dims.num_layers), tokens, dims)
        expected = own(tokens, use_cache=False).logits
    return float((ours - expected).abs().max() / expected.abs().max())


class Halves(QueryGate):
    """All queries, then all gates."""

    def __init__(self, linear: nn.Linear, head_dim: int) -> None:
        super().__init__(linear, head_dim)
        first, second = linear.weight.detach().chunk(2)
        self.query.weight, self.gate.weight = nn.Parameter(first.clone()), nn.Parameter(second.clone())


class Ungrouped(GroupedParts):
    """All rows of a part, then all of the next."""

    def __init__(self, linear: nn.Linear, num_groups: int, widths: tuple[int, ...]) -> None:
        super().__init__(linear, num_groups, widths)
        rows = linear.weight.detach().split([num_groups * width for width in widths])
        for part, weight in zip(self.parts, rows, strict=True):
            part.weight = nn.Parameter(weight.clone())


def _forget_one(model: Any) -> None:
    """The norms' weights w are used in place of 1 + w."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.weight.data -= 1


def _gate_first(model: Any) -> None:
    """The gate of a Gated DeltaNet goes before its norm."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNormGated"):
            own = module.forward
            module.forward = lambda x, z, own=own: own(x * nn.functional.silu(z), torch.full_like(z, 1.2784645))


def _keep(model: Any) -> None:
    pass


MUTANTS: dict[str, tuple[str, dict[str, Any], Callable[[Any], None]]] = {
    "gates after all queries": ("qwen3.5", {"QueryGate": Halves}, _keep),
    "w in place of 1 + w": ("qwen3.5", {}, _forget_one),
    "gate before norm": ("qwen3.5", {}, _gate_first),
    "keys not normalised": ("qwen3.5", {"_normalised": lambda rows, module: rows}, _keep),
    "no softplus": ("qwen3.5", {"softplus": lambda x: x.relu()}, _keep),
    "parts not grouped by head": ("qwen3-next", {"GroupedParts": Ungrouped}, _keep),
}


# Of a mixer, by the function that they replace.
MIXER_MUTANTS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "norm before gate": ("granite4", "_gated", lambda module, out, gate: module.norm(out) * nn.functional.silu(gate)),
    "no D x": ("granite4", "_with_skip", lambda out, x, module: out),
    "D of the head before": (
        "granite4", "_with_skip", lambda out, x, module: out + x * module.D.roll(1).repeat_interleave(module.head_dim)
    ),
    "convolution without bias": ("granite4", "_bias_of", lambda conv: torch.zeros(conv.out_channels)),
    "short convolution without bias": ("lfm2", "_bias_of", lambda conv: torch.zeros(conv.out_channels)),
    "dt without limits": ("granite4", "_limited", lambda time_step, limits: time_step),
    "dt without its lower limit": ("nemotron-h", "_limited", lambda time_step, limits: time_step),
    "SiLU after a short convolution": ("lfm2", "_NO_ACTIVATION", 1),
    "factors left out": ("falcon-h1", "_scale", lambda linear, *factors: None),
}  # fmt: skip


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-next", "granite4", "nemotron-h", "lfm2", *VARIANTS])
def test_without_a_mistake_the_logits_are_equal(folders: dict[str, tuple[Path, Any]], name: str) -> None:
    assert difference(*folders[name]) < MAX_RELATIVE_DIFFERENCE


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_noticed(folders: dict[str, tuple[Path, Any]], name: str, monkeypatch: Patch) -> None:
    family, replaced, change = MUTANTS[name]
    for attribute, value in replaced.items():
        monkeypatch.setattr(delta_layers, attribute, value)
    assert difference(*folders[family], change) > 100 * MAX_RELATIVE_DIFFERENCE


@pytest.mark.parametrize("name", MIXER_MUTANTS)
def test_a_mistake_in_a_mixer_is_noticed(folders: dict[str, tuple[Path, Any]], name: str, monkeypatch: Patch) -> None:
    family, attribute, value = MIXER_MUTANTS[name]
    monkeypatch.setattr(mamba_layers, attribute, value)
    assert difference(*folders[family]) > 100 * MAX_RELATIVE_DIFFERENCE


@pytest.mark.parametrize("name", ["nemotron-h", "mamba2"])
def test_tables_are_found_under_the_names_in_the_files(folders: dict[str, tuple[Path, Any]], name: str) -> None:
    folder, model = folders[name]
    job = GraphJob("target", str(folder))
    tables = read_tables(SourceContext("checkpoint", 16, 4, read_dims(folder), job))
    assert torch.equal(tables.embeddings, model.get_input_embeddings().weight)
    assert torch.equal(tables.lm_head, model.get_output_embeddings().weight)


def test_other_activations_are_refused(folders: dict[str, tuple[Path, Any]]) -> None:
    model = folders["bamba"][1]
    mixer = next(m for m in model.modules() if type(m).__name__ == "BambaMixer")
    mixer.activation = "gelu"
    with pytest.raises(ExportError, match=r"BambaMixer \(layer 0\): got the activation 'gelu'"):
        replace_layers(model)


def test_split_projections_give_what_the_whole_one_gives() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(2, 3, 8)
    for linear, split in (
        (whole := nn.Linear(8, 4 * 2 * 5), QueryGate(whole, 5)),
        (whole := nn.Linear(8, 3 * 16, bias=False), GroupedParts(whole, 3, (2, 2, 6, 6))),
    ):
        np.testing.assert_allclose(split(hidden).detach(), linear(hidden).detach(), atol=1e-6)
