# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime GenAI as a peer: models from its own builder, its own draft-model and n-gram decoding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from peer_process import Decode, Job, Peer, Steps, main

BUILDER = "onnxruntime_genai.models.builder"
NGRAM_SIZE = 3


def convert(source: Path, dest: Path, form: str) -> None:
    """Run the package's model builder."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", BUILDER, "-i", str(source), "-o", str(dest), "-p", form, "-e", "cpu"]
        subprocess.run([*command, "-c", cache], check=True)


def _config(folder: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(folder) / "genai_config.json").read_text(encoding="utf-8"))
    return config


def _write_config(job: Job, mode: str, folder: Path) -> None:
    """Writes a model's folder of its own: the target, with the draft model's decoder where `mode` asks for it.

    Files outside the folder may not be named, so those of the models are linked into it.
    """
    config = _config(job["target"])
    decoders = {"decoder": (job["target"], config["model"]["decoder"])}
    if mode == "draft_model":
        config["model"]["draft"] = _config(job["draft"])["model"]["decoder"]
        decoders["draft"] = (job["draft"], config["model"]["draft"])
        config["speculative"] = {"max_draft_tokens": job["draft_tokens"]}
    if mode == "ngram":
        config["speculative"] = {"ngram_size": NGRAM_SIZE, "max_draft_tokens": job["draft_tokens"]}
    for name, (home, decoder) in decoders.items():
        (folder / name).mkdir()
        for file in Path(home).iterdir():
            os.link(file, folder / name / file.name)
        decoder["filename"] = f"{name}/{decoder['filename']}"
        decoder["session_options"]["intra_op_num_threads"] = job["threads"]
    if job["eos_token_ids"]:
        config["model"]["eos_token_id"] = list(job["eos_token_ids"])
    (folder / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")


def logits(job: Job) -> Iterator[Any]:
    """Yields the logits of each text."""
    import numpy as np
    import onnxruntime_genai as og

    with tempfile.TemporaryDirectory(dir=Path(job["target"]).parent) as folder:
        _write_config({**job, "eos_token_ids": []}, "plain", Path(folder))
        model = og.Model(folder)
    for text in job["texts"]:
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=len(text) + 1)
        generator = og.Generator(model, params)
        generator.append_tokens(np.array([text], dtype=np.int32))
        yield generator.get_output("logits")[0]


def load(job: Job) -> dict[str, Decode]:
    """Returns a decoder, with a model, for each mode."""
    import numpy as np
    import onnxruntime_genai as og

    def decoder(mode: str) -> Decode:
        with tempfile.TemporaryDirectory(dir=Path(job["target"]).parent) as folder:
            _write_config(job, mode, Path(folder))
            model = og.Model(folder)

        def decode(prompt: Sequence[int], max_new_tokens: int) -> Steps:
            params = og.GeneratorParams(model)
            # A checkpoint's own repetition penalty is no part of greedy decoding.
            params.set_search_options(do_sample=False, max_length=len(prompt) + max_new_tokens, repetition_penalty=1.0)
            generator, steps = og.Generator(model, params), Steps()
            generator.append_tokens(np.array([prompt], dtype=np.int32))
            steps.prompt_end = time.perf_counter()  # a round's tokens come one by one: the first takes the round's time
            while not generator.is_done():
                generator.generate_next_token()
                steps.add(generator.get_next_tokens())
            # The whole sequence: several tokens of one round may have come at once.
            steps.tokens = [int(token) for token in generator.get_sequence(0)[len(prompt) :]]
            return steps

        return decode

    return {mode: decoder(mode) for mode in job["modes"]}


if __name__ == "__main__":
    main(
        Peer(
            packages=("onnxruntime-genai", "onnxruntime"),
            forms={"fp32": "fp32", "int8": "int8", "int4": "int4"},
            modes=("plain", "draft_model", "ngram"),
            convert=convert,
            load=load,
            logits=logits,
        )
    )
