# SPDX-License-Identifier: Apache-2.0
"""Distance of a quantised form of a target from the float32 graph, and the choice of the form.

A process of its own (`measure_distances` starts it) gives the memory of all forms back.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.backends.distance import Distance, compare, distance_from_rows
from speccompile.backends.onnxruntime.answers import Text, open_reader, piece_length, read, texts_of
from speccompile.backends.onnxruntime.tune import typical_cost
from speccompile.checkpoints.texts import TextSample
from speccompile.core import specs
from speccompile.core.specs import GraphSpec, TensorSpec, all_sure, spec_from_json
from speccompile.errors import BuildError

MAX_KL = 0.02
MAX_PERPLEXITY_CHANGE = 0.01
NUM_TOKENS = 2048  # at least: the error of a perplexity's change by int8 is 0.2 to 0.4 % then


def is_near(row: Distance) -> bool:
    """Returns whether a user would accept the distance: its perplexity by as much as two standard errors allow."""
    least = (row.perplexity_change or 0.0) - 2 * row.perplexity_error
    return row.kl <= MAX_KL and least <= MAX_PERPLEXITY_CHANGE


def near_forms(numbers: Mapping[str, str], distances: Mapping[str, Distance]) -> list[str]:
    """Returns the forms near float32, of which the fastest is kept; where none is, the nearest.

    Kernels of the same numbers differ by the last bits of their sums: the nearest's distance holds for all of them, so
    that noise does not choose.

    Args:
        distances: by form; empty where the graph does not change the text (drafts): then only speed counts.
    """
    if not distances:
        return list(numbers)
    best: dict[str, Distance] = {}
    for form, row in distances.items():
        held = best.get(numbers[form])
        best[numbers[form]] = row if held is None or row.kl < held.kl else held
    near = {name for name, row in best.items() if is_near(row)} or {min(best, key=lambda name: best[name].kl)}
    return [form for form, name in numbers.items() if name in near]


def fastest_form(step_ms: Mapping[str, Mapping[str, float]]) -> str:
    """Returns the fastest form by {nodes: milliseconds} of each: the product of one node and a handful counts."""
    return min(step_ms, key=lambda form: typical_cost(step_ms[form]))


def with_logits(spec: GraphSpec) -> GraphSpec:
    """Returns the spec of a target with its logits as an output, [batch, scored, vocab] float32."""
    if any(t.name == specs.LOGITS for t in spec.outputs):
        return spec
    logits = TensorSpec(specs.LOGITS, ("batch", "scored", spec.vocab_size), "float32")
    after = [t.name for t in spec.outputs].index(specs.NEXT_TOKEN) + 1
    return replace(spec, outputs=(*spec.outputs[:after], logits, *spec.outputs[after:]))


def measure_distances(
    reference: Path, forms: Mapping[str, Path], spec: GraphSpec, sample: TextSample, form_spec: GraphSpec | None = None
) -> dict[str, Distance]:
    """Measures the distance of lowered graphs of `form_spec` from the float32 graph `reference`, in a child process.

    Returns:
        By form; empty where the caches have no room for two tokens.

    Raises:
        BuildError: the child died, or a graph computes logits that are not finite.
    """
    request = {
        "reference": str(reference),
        "forms": {form: str(path) for form, path in forms.items()},
        "spec": spec.json_from_spec(),
        "form_spec": (form_spec or spec).json_from_spec(),
        "sample": asdict(sample),
    }
    command = [sys.executable, "-m", "speccompile.backends.onnxruntime.fidelity"]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = done.stderr.strip()[-500:]
        got = f"exit code {done.returncode}: {tail}"
        raise BuildError(f"distance of {reference.parent}", got, "a measurement", "See the message.")
    rows = json.loads(done.stdout.splitlines()[-1])
    return {form: Distance(**row) for form, row in rows.items()}


def _logits(path: Path, spec: GraphSpec, texts: list[Text]) -> Iterator[NDArray[np.float32]]:
    """Yields the logits [tokens, vocab] that predict the tokens of interest of each text, which is read in pieces."""
    engine, piece = open_reader(path, spec, 1, max(len(text.tokens) for text in texts)), piece_length()
    for text in texts:
        engine.reset()
        first, end = text.start - 1, len(text.tokens) - 1
        read(engine, spec, text.tokens[:first])
        rows = []
        for at in range(first, end, piece):
            part = np.array([text.tokens[at : min(at + piece, end)]], np.int64)
            sure = all_sure(spec, 1, part.shape[1])
            step = engine.run({specs.TOKENS: part, specs.LENGTHS: np.full(1, at, np.int64), **sure})
            rows.append(np.array(step[specs.LOGITS][0]))
            if not np.isfinite(rows[-1]).all():
                got, todo = "numbers that are not finite", "Check the weights."
                raise BuildError(f"logits of {path}", got, "finite logits", todo)
        yield np.concatenate(rows)


def main() -> None:
    """Child process: a request as JSON on standard input, the distances as the last line of standard output."""
    request = json.load(sys.stdin)
    spec, form_spec = (spec_from_json(request[name]) for name in ("spec", "form_spec"))
    forms = {form: Path(path) for form, path in request["forms"].items()}
    if spec.max_rows and spec.max_rows < 2:
        print(json.dumps({}))
        return
    reference = Path(request["reference"])
    texts = texts_of(reference, spec, sample_from_json(request["sample"]), NUM_TOKENS, measures=True)
    ends = np.cumsum([len(text.tokens) - text.start for text in texts])
    found = {}
    with tempfile.TemporaryFile(dir=reference.parent) as file:  # of gigabytes with a large vocabulary
        wanted: NDArray[np.float32] = np.memmap(file, np.float32, "w+", shape=(int(ends[-1]), spec.vocab_size))
        for end, rows in zip(ends, _logits(reference, spec, texts), strict=True):
            wanted[end - len(rows) : end] = rows
        for form, path in forms.items():
            compared = []
            for text, end, rows in zip(texts, ends, _logits(path, form_spec, texts), strict=True):
                compared.append(compare(wanted[end - len(rows) : end], rows, np.array(text.tokens[text.start :])))
            found[form] = asdict(distance_from_rows(compared))
    print(json.dumps(found))


def sample_from_json(record: Mapping[str, Any]) -> TextSample:
    texts, prompts = (tuple(map(tuple, record[name])) for name in ("texts", "prompts"))
    return TextSample(**{**record, "texts": texts, "prompts": prompts, "stop_ids": tuple(record["stop_ids"])})


if __name__ == "__main__":
    main()
