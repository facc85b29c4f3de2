# SPDX-License-Identifier: Apache-2.0
"""Logits of a model that openvino_peer.py converted, run in its environment by distance.py.

Standard input: {"model": folder, "texts": [[token id]], "hints": {property: value}, "out": file}. Writes `out`, an npz
file with an array [tokens, vocab] float32 for each text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import openvino as ov


def main() -> None:
    """Read every text in one run, from an empty state."""
    job = json.load(sys.stdin)
    compiled = ov.Core().compile_model(Path(job["model"]) / "openvino_model.xml", "CPU", job["hints"])
    request, names = compiled.create_infer_request(), {port.any_name for port in compiled.inputs}
    rows = {}
    for index, text in enumerate(job["texts"]):
        request.reset_state()
        ids = np.array([text], dtype=np.int64)
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "beam_idx": np.zeros(1, dtype=np.int32)}
        feeds["position_ids"] = np.arange(len(text), dtype=np.int64)[None]
        result = request.infer({name: feeds[name] for name in names})
        rows[f"{index:04}"] = np.array(result["logits"][0], dtype=np.float32)
    np.savez(job["out"], **rows)


if __name__ == "__main__":
    main()
