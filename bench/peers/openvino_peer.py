# SPDX-License-Identifier: Apache-2.0
"""OpenVINO GenAI as a peer: models from optimum-intel's exporter, its own draft-model and prompt-lookup decoding."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from peer_process import Decode, Job, Peer, Steps, main

NGRAM_SIZE = 3
# bf16 is a precision of computation: weights are rounded when the model is loaded.
EXPORT = {
    "fp32": ["--weight-format", "fp32"],
    "16bit": ["--weight-format", "fp32"],
    "int8": ["--weight-format", "int8"],
    "int4": ["--weight-format", "int4", "--group-size", "32", "--ratio", "1.0"],
}
HINTS = {
    "fp32": {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"},
    "16bit": {"INFERENCE_PRECISION_HINT": "bf16"},
}


def convert(source: Path, dest: Path, form: str) -> None:
    """Run optimum-intel's command."""
    command = [str(Path(sys.executable).parent / "optimum-cli"), "export", "openvino", "--model", str(source)]
    subprocess.run([*command, "--task", "text-generation-with-past", *EXPORT[form], str(dest)], check=True)


def logits(job: Job) -> Iterator[Any]:
    """Yields the logits of each text, from an empty state."""
    import numpy as np
    import openvino as ov

    hints = {"INFERENCE_NUM_THREADS": job["threads"], **HINTS.get(job["form"], {})}
    compiled = ov.Core().compile_model(Path(job["target"]) / "openvino_model.xml", "CPU", hints)
    request, names = compiled.create_infer_request(), {port.any_name for port in compiled.inputs}
    for text in job["texts"]:
        request.reset_state()
        ids = np.array([text], dtype=np.int64)
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "beam_idx": np.zeros(1, dtype=np.int32)}
        feeds["position_ids"] = np.arange(len(text), dtype=np.int64)[None]
        yield request.infer({name: feeds[name] for name in names})["logits"][0]


def load(job: Job) -> dict[str, Decode]:
    """Returns a decoder, with a pipeline, for each mode."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    device = {"INFERENCE_NUM_THREADS": job["threads"], **HINTS.get(job["form"], {})}

    def pipeline(mode: str) -> Any:
        extra = {}
        if mode == "draft_model":
            extra = {"draft_model": genai.draft_model(job["draft"], "CPU", **device)}
        elif mode == "ngram":
            extra = {"prompt_lookup": True}
        return genai.LLMPipeline(job["target"], "CPU", **extra, **device)

    def config(mode: str) -> Any:
        made = genai.GenerationConfig()
        made.do_sample = False
        made.stop_token_ids = set(job["eos_token_ids"])
        if mode != "plain":
            made.num_assistant_tokens = job["draft_tokens"]
        if mode == "ngram":
            made.max_ngram_size = NGRAM_SIZE
        return made

    def decoder(mode: str) -> Decode:
        runner, settings = pipeline(mode), config(mode)

        def decode(prompt: Sequence[int], max_new_tokens: int) -> Steps:
            settings.max_new_tokens = max_new_tokens
            ids = np.array([prompt], dtype=np.int64)
            start = time.perf_counter()
            result = runner.generate(genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids))), settings)
            end = time.perf_counter()
            tokens = [int(token) for token in result.tokens[0]]
            # It says when the first step ended and how many there were; the others lie evenly between.
            first = start + result.perf_metrics.get_ttft().mean / 1e3
            num_later = max(len(result.perf_metrics.raw_metrics.m_new_token_times) - 1, 1)
            times = [first + (end - first) * step / num_later for step in range(num_later + 1)]
            return Steps(tokens, times)

        return decode

    return {mode: decoder(mode) for mode in job["modes"]}


if __name__ == "__main__":
    main(
        Peer(
            packages=("openvino-genai", "openvino", "optimum-intel", "nncf"),
            forms={"fp32": "f32", "16bit": "bf16", "int8": "int8", "int4": "int4 (groups of 32)"},
            modes=("plain", "draft_model", "ngram"),
            convert=convert,
            load=load,
            logits=logits,
        )
    )
