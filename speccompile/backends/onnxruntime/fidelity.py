# SPDX-License-Identifier: Apache-2.0
"""Distance of a quantised form of a target from the float32 graph, and the choice of the form.

Run as a process of its own (`measure_distances` starts it), as measurements of time are: the first session of a
process decides how denormals are treated.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.backends.distance import Distance, Floats, distance
from speccompile.backends.onnxruntime.tune import typical_cost
from speccompile.core import specs
from speccompile.core.probes import all_sure
from speccompile.core.specs import GraphSpec, TensorSpec, spec_from_json
from speccompile.errors import BuildError

# Mean KL divergence from float32 in nats. int8 on the example target: 1e-3 with one scale an activation row, 2e-4 to
# 3e-4 with one per 32 entries (55 of 72 greedy texts of 96 tokens equal float32's, see docs/cpu_kernels.md).
MAX_KL = 5e-4
# Without quantisation only the order of summation differs: 1e-12 to 1e-9 were measured.
MAX_KL_UNQUANTIZED = 1e-6
SAME_WEIGHTS = 1.1  # the largest ratio of the KL divergences of two kernels for the same weights
NUM_TEXTS, NUM_TOKENS = 4, 64  # number of texts, drawn from the model itself so that no corpus is needed
PIECE = 16  # tokens of a run: without our kernels every token copies its experts' weights
SEED = 0


def near_forms(forms: Sequence[str], distances: Mapping[str, Distance], unquantized: Collection[str] = ()) -> list[str]:
    """Returns the forms within `MAX_KL` of float32, of which the fastest is kept.

    Where none is, the nearest: kernels for the same weights differ by less than `SAME_WEIGHTS`.

    Args:
        forms: to choose from.
        distances: by form; empty where the graph does not change the text (drafts): then only speed counts.
        unquantized: forms whose weights are not quantised: their bound is `MAX_KL_UNQUANTIZED`.
    """
    bounds = {form: MAX_KL_UNQUANTIZED if form in unquantized else MAX_KL for form in forms}
    near = [form for form in forms if form not in distances or distances[form].kl <= bounds[form]]
    if near:
        return near
    most = SAME_WEIGHTS * min(row.kl for row in distances.values())
    return [form for form in forms if distances[form].kl <= most]


def fastest_form(step_ms: Mapping[str, Mapping[str, float]]) -> str:
    """Returns the fastest form.

    Args:
        step_ms: by form: {nodes: milliseconds}. A draft-verify loop alternates between one node and a handful, so
            the product of both counts.
    """
    return min(step_ms, key=lambda form: typical_cost(step_ms[form]))


def with_logits(spec: GraphSpec) -> GraphSpec:
    """Returns the spec of a target with its logits as an output, [batch, scored, vocab] float32."""
    if any(t.name == specs.LOGITS for t in spec.outputs):
        return spec
    logits = TensorSpec(specs.LOGITS, ("batch", "scored", spec.vocab_size), "float32")
    after = [t.name for t in spec.outputs].index(specs.NEXT_TOKEN) + 1
    return replace(spec, outputs=(*spec.outputs[:after], logits, *spec.outputs[after:]))


def measure_distances(reference: Path, forms: Mapping[str, Path], spec: GraphSpec) -> dict[str, Distance]:
    """Measures the distance of lowered graphs from the float32 graph, in a child process.

    Args:
        reference: the float32 graph.
        forms: lowered graphs of the same model, by form.
        spec: of all of them, with logits.

    Returns:
        By form; empty where the caches have no room for two tokens.

    Raises:
        BuildError: the child died, or a graph computes logits that are not finite.
    """
    request = {
        "reference": str(reference),
        "forms": {form: str(path) for form, path in forms.items()},
        "spec": spec.json_from_spec(),
    }
    command = [sys.executable, "-m", "speccompile.backends.onnxruntime.fidelity"]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = done.stderr.strip()[-500:]
        got = f"exit code {done.returncode}: {tail}"
        raise BuildError(f"distance of {reference.parent}", got, "a measurement", "See the message.")
    rows = json.loads(done.stdout.splitlines()[-1])
    return {form: Distance(**row) for form, row in rows.items()}


def _logits(path: Path, spec: GraphSpec, texts: NDArray[np.int64], prepack: bool) -> Floats:
    """Returns the logits [texts, tokens, vocab] float64, each text read in pieces."""
    from speccompile.backends.onnxruntime.engine import load_engine

    # The float32 weights stay mapped from their file: a packed copy of a large model would not fit beside the build.
    settings = {"threads": 0, "prepack": prepack}
    engine = load_engine(path, spec, max_slots=1, max_rows=texts.shape[1], settings=settings)
    result = np.empty((*texts.shape, spec.vocab_size))
    for row, text in zip(result, texts, strict=True):
        for at in range(0, len(text), PIECE):
            part = text[None, at : at + PIECE]
            sure = all_sure(spec, 1, part.shape[1])
            step = engine.run({specs.TOKENS: part, specs.LENGTHS: np.full(1, at, np.int64), **sure})
            row[at : at + PIECE] = step[specs.LOGITS][0]
    if not np.isfinite(result).all():
        raise BuildError(f"logits of {path}", "numbers that are not finite", "finite logits", "Check the weights.")
    return result


def draw_texts(
    path: Path, spec: GraphSpec, num_texts: int = NUM_TEXTS, num_tokens: int = NUM_TOKENS, seed: int = SEED
) -> NDArray[np.int64]:
    """Draws texts from a graph at temperature 1.

    Args:
        path: the lowered graph of a target.
        spec: its inputs and outputs.
        num_texts: drawn side by side, from first tokens that lie as far apart as possible in the vocabulary.
        num_tokens: of each; fewer where the caches hold fewer.
        seed: of the draws, and of the first tokens.

    Returns:
        [texts, tokens] int64.
    """
    from speccompile.backends.onnxruntime.engine import load_engine

    num_tokens = min(num_tokens, spec.max_rows or num_tokens)
    engine = load_engine(path, spec, max_slots=num_texts, max_rows=num_tokens, settings={"threads": 0})
    texts = np.zeros((num_texts, num_tokens), np.int64)
    texts[:, 0] = (np.arange(num_texts) * spec.vocab_size // num_texts + seed) % spec.vocab_size
    rng = np.random.default_rng(seed)
    for at in range(num_tokens - 1):
        feeds: dict[str, NDArray[Any]] = {
            specs.TOKENS: texts[:, at : at + 1],
            specs.LENGTHS: np.full(num_texts, at, np.int64),
            specs.TEMPERATURE: np.ones(num_texts, np.float32),
            specs.UNIFORMS: rng.random((num_texts, 1, 2), dtype=np.float32),
            **all_sure(spec, num_texts, 1),
        }
        texts[:, at + 1] = engine.run(feeds)[specs.NEXT_TOKEN]
    return texts


def main() -> None:
    """Child process: a request as JSON on standard input, the distances as the last line of standard output."""
    request = json.load(sys.stdin)
    spec, forms = spec_from_json(request["spec"]), {form: Path(path) for form, path in request["forms"].items()}
    if spec.max_rows and spec.max_rows < 2:
        print(json.dumps({}))
        return
    texts = draw_texts(next(iter(forms.values())), spec)
    wanted = _logits(Path(request["reference"]), spec, texts, prepack=False)
    found = {form: distance(wanted, _logits(path, spec, texts, prepack=True)) for form, path in forms.items()}
    print(json.dumps({form: {"kl": row.kl, "top1": row.top1} for form, row in found.items()}))


if __name__ == "__main__":
    main()
