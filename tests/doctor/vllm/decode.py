# SPDX-License-Identifier: Apache-2.0
"""Run by vLLM's interpreter: greedy tokens of some prompts, and counts of its drafts.

Reads {"target", "prompts", "num_tokens", "speculative_config"} as JSON from the first argument, writes to the second.
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams


def main() -> None:
    asked = json.loads(sys.argv[1])
    llm = LLM(
        asked["target"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=1,
        speculative_config=asked["speculative_config"],
        disable_log_stats=False,
        enable_prefix_caching=False,
    )
    params = SamplingParams(temperature=0, max_tokens=asked["num_tokens"], ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
    texts = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params)]
    counts = {m.name: getattr(m, "value", getattr(m, "values", None)) for m in llm.get_metrics()}
    held = {name.removeprefix("vllm:spec_decode_"): value for name, value in counts.items() if "spec_decode" in name}
    Path(sys.argv[2]).write_text(json.dumps({"texts": texts, **held}))


if __name__ == "__main__":
    main()
