# SPDX-License-Identifier: Apache-2.0
"""transformers as a peer: its own `generate` in fp32 and bf16, with an assistant model or prompt lookup."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peer_process import Decode, Job, Peer, Steps, main

NGRAM_SIZE = 3


def convert(source: Path, dest: Path, form: str) -> None:
    """Copy the checkpoint: it is in the peer's format already."""
    del form
    shutil.copytree(source, dest)


def load(job: Job) -> dict[str, Decode]:
    """Returns decoders that share one target."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.generation.streamers import BaseStreamer
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(job["threads"])
    dtype = {"fp32": torch.float32, "16bit": torch.bfloat16}[job["form"]]

    def read(folder: str) -> Any:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        model.generation_config = GenerationConfig()  # a stored repetition penalty is no part of greedy decoding
        return model

    class Clock(BaseStreamer):
        """Gets the prompt first, then the tokens of each step."""

        def __init__(self) -> None:
            self.steps, self.has_prompt = Steps(), False

        def put(self, value: torch.Tensor) -> None:
            if self.has_prompt:
                self.steps.add(value.flatten().tolist())
            self.has_prompt = True

        def end(self) -> None:
            """Does nothing: no tokens follow."""

    target = read(job["target"])
    lookup = {"prompt_lookup_num_tokens": job["draft_tokens"], "max_matching_ngram_size": NGRAM_SIZE}
    options: dict[str, dict[str, Any]] = {"plain": {}, "ngram": lookup}
    if "draft_model" in job["modes"]:
        draft = read(job["draft"])
        draft.generation_config.num_assistant_tokens = job["draft_tokens"]
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        options["draft_model"] = {"assistant_model": draft}

    def decoder(extra: dict[str, Any]) -> Decode:
        def decode(prompt: Sequence[int], max_new_tokens: int) -> Steps:
            clock, ids = Clock(), torch.tensor([list(prompt)])
            with torch.inference_mode():
                out = target.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False,
                    eos_token_id=list(job["eos_token_ids"]) or None, pad_token_id=0, streamer=clock, **extra,
                )  # fmt: skip
            clock.steps.tokens = out[0, len(prompt) :].tolist()
            return clock.steps

        return decode

    return {mode: decoder(options[mode]) for mode in job["modes"]}


if __name__ == "__main__":
    main(
        Peer(
            packages=("transformers", "torch"),
            forms={"fp32": "fp32", "16bit": "bf16"},
            modes=("plain", "draft_model", "ngram"),
            convert=convert,
            load=load,
        )
    )
