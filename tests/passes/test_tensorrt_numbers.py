# SPDX-License-Identifier: Apache-2.0
"""TensorRT's form of a decoder gives the neutral graph's numbers: exactly in float32, near in half precision."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from speccompile.core.dims import ModelDims
from speccompile.core.specs import HIDDEN, LOGITS
from speccompile.passes.base import Pass, histogram_from_model
from speccompile.passes.lower_attention_tensorrt import lower_attention_tensorrt
from tests import store
from tests.export.families import CONFIGS, VOCAB
from tests.export.harness import chain_parents, logits_of, make_checkpoint, paths_of
from tests.passes.half_lab import Stepper, emulated, lowered, neutral_session, session_of

pytestmark = [pytest.mark.export, pytest.mark.plan]

MAX_ROWS = 32
MAX_SEQ_LEN = 24
# Of logits of order 1; two orders of float32 sums. Seen at most 7e-6.
MAX_ABS_DIFFERENCE = 2e-5
FUSED = Pass("fused", lambda m: lower_attention_tensorrt(m, fused=True))

# A window, a softcap with local and global layers, norms on Q and K, merged QKV, positions added, experts, sinks.
FAMILIES = ["llama3", "mistral", "gemma2", "gpt2", "qwen3", "phi3", "mixtral", "gpt-oss"]


class Model:
    """A checkpoint of random weights, its neutral graph, and three steps that both forms take."""

    def __init__(self, name: str, folder: Path) -> None:
        self.reference = make_checkpoint(CONFIGS[name], folder)
        self.graph, self.dims = store.export_decoder(folder, max_seq_len=MAX_SEQ_LEN, hidden=True)

    def steps(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(tokens, lengths, parents) of a ragged prefill, a tree in each slot, and a chain after a rollback."""
        rng = np.random.default_rng(0)
        first, second, third = (rng.integers(3, VOCAB, (2, n)) for n in (7, 6, 4))
        trees = np.array([[-1, 0, 0, 1, 1, 2], [-1, 0, 1, 1, 0, 4]])
        return [
            (first, np.array([0, 0]), np.array([chain_parents(7, 7), chain_parents(3, 7)])),
            (second, np.array([7, 3]), trees),
            (third, np.array([4, 2]), np.array([[-1, 0, 1, 2]] * 2)),
        ]

    def histories(self) -> list[list[list[int]]]:
        """Tokens of the cache rows in use, by step and slot."""
        first = self.steps()[0][0]
        return [[[], []], [first[0].tolist(), first[1, :3].tolist()], [first[0, :4].tolist(), first[1, :2].tolist()]]

    def run(self, session: Any, dims: ModelDims, spare_rows: int = 0) -> list[np.ndarray]:
        """Logits [2, nodes, vocab] and hidden states of each step; those of padding are zero."""
        stepper, found = Stepper.of(session, dims, 2, MAX_ROWS, spare_rows), []
        for tokens, lengths, parents in self.steps():
            scored = np.tile(np.arange(tokens.shape[1]), (2, 1))
            outputs = stepper.step(tokens, lengths, parents, scored)
            is_real = (parents >= 0) | (np.arange(tokens.shape[1]) == 0)
            found += [outputs[name] * is_real[:, :, None] for name in (LOGITS, HIDDEN)]
        return found


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp(request.param))


def worst(got: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    return max(float(np.abs(g - w).max()) for g, w in zip(got, wanted, strict=True))


def test_float32_form_equals_the_neutral_graph(family):
    wanted = family.run(neutral_session(family.graph), family.dims)
    products = lowered(family.graph, family.dims, "float32", MAX_ROWS, hidden=True)
    assert "Attention" not in histogram_from_model(products)
    for spare_rows in (0, 9):
        assert worst(family.run(session_of(products), family.dims, spare_rows), wanted) < MAX_ABS_DIFFERENCE
    nodes = lowered(family.graph, family.dims, "float32", MAX_ROWS, attention=FUSED, hidden=True)
    assert worst(family.run(session_of(nodes), family.dims, 3), wanted) < MAX_ABS_DIFFERENCE


def naive_error(family: Model, dtype: str) -> float:
    """The largest error of transformers' own half-precision forward, against its float64 one, over the same paths."""
    import copy

    import torch

    family.reference.set_experts_implementation("eager")  # torch's grouped product has no float64
    half = copy.deepcopy(family.reference).to(getattr(torch, dtype))
    exact = copy.deepcopy(family.reference).double()
    largest = 0.0
    for (tokens, _, parents), history in zip(family.steps(), family.histories(), strict=True):
        for slot in range(2):
            for node, path in enumerate(paths_of(history[slot], tokens[slot], parents[slot])):
                if node == 0 or parents[slot, node] >= 0:
                    with torch.no_grad():
                        got = half(torch.tensor([path]), use_cache=False).logits[0, -1].double().numpy()
                    largest = max(largest, float(np.abs(got - logits_of(exact, path)).max()))
    return largest


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_form_errs_at_most_twice_as_much_as_the_naive_formula(family, dtype):
    # The neutral graph in float32 replaces float64: it is a thousand times closer to it than either half form.
    wanted = family.run(neutral_session(family.graph), family.dims)[::2]
    model = lowered(family.graph, family.dims, dtype, MAX_ROWS, attention=FUSED, hidden=True)
    got = family.run(session_of(emulated(model)), family.dims, 3)[::2]
    naive = naive_error(family, dtype)
    assert worst(got, wanted) < 2 * naive
    assert worst(got, wanted) > MAX_ABS_DIFFERENCE, "nothing was rounded"
