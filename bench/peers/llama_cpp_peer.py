# SPDX-License-Identifier: Apache-2.0
"""llama.cpp as a peer, through llama-cpp-python: GGUF files of Llama checkpoints, quantised by its own quantiser.

The files hold no vocabulary: prompts are token ids. Prompt lookup is llama-cpp-python's; a draft model is another
`Llama` given through its interface for drafting.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from peer_process import Decode, Job, Peer, Steps, main

FILE = "model.gguf"
FTYPES = {"16bit": "LLAMA_FTYPE_MOSTLY_BF16", "int8": "LLAMA_FTYPE_MOSTLY_Q8_0", "int4": "LLAMA_FTYPE_MOSTLY_Q4_0"}
NGRAM_SIZE = 3


def _library() -> Any:
    """Returns llama_cpp; on a CPU with AMX without extra layouts of weights: its AMX kernels crash there (0.3.36)."""
    import llama_cpp

    cpu = Path("/proc/cpuinfo")
    if cpu.is_file() and "amx_int8" in cpu.read_text(encoding="utf-8"):
        names = llama_cpp.llama_cpp  # where its `Llama` looks them up
        params = names.llama_model_default_params()
        params.use_extra_bufts = False
        names.llama_model_default_params = lambda: params
    return llama_cpp


def _head_pairs(weight: Any, num_heads: int) -> Any:
    """Reorders the rows of a query or key weight: halves of a head, as Hugging Face rotates, to neighbouring pairs."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_fp32(source: Path, file: Path) -> None:
    import gguf
    import ml_dtypes  # noqa: F401  numpy then knows bfloat16
    import numpy as np
    from safetensors.numpy import load_file

    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama" or config.get("rope_parameters", {}).get("rope_type", "default") != "default":
        raise SystemExit(f"{source}: got model type {config['model_type']}; this writes plain Llama models alone")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads["q_proj"])
    writer.add_head_count_kv(heads["k_proj"])
    head_size = config.get("head_dim") or config["hidden_size"] // heads["q_proj"]
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    theta = config.get("rope_parameters", {}).get("rope_theta") or config.get("rope_theta", 10000.0)
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for part in sorted(source.glob("*.safetensors")):
        for name, weight in load_file(part).items():
            value = weight.astype(np.float32)
            for kind, num_heads in heads.items():
                value = _head_pairs(value, num_heads) if name.endswith(f"{kind}.weight") else value
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def convert(source: Path, dest: Path, form: str) -> None:
    """Write a GGUF file in float32, and let llama.cpp quantise it where `form` says so; a GGUF file stays as it is."""
    import llama_cpp

    dest.mkdir()
    file = dest / FILE
    if form == "stored":
        if "-of-" in source.name:
            raise SystemExit(f"{source}: got one of several files; a model of one file is compared")
        file.symlink_to(source.resolve())
        return
    _write_fp32(source, file)
    if form in FTYPES:
        full = file.rename(dest / "fp32.gguf")
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = getattr(llama_cpp, FTYPES[form])
        code = llama_cpp.llama_model_quantize(str(full).encode(), str(file).encode(), params)
        if code:
            raise SystemExit(f"llama_model_quantize returned {code}")
        full.unlink()


def logits(job: Job) -> Iterator[Any]:
    """Yields the logits of each text."""
    llama_cpp = _library()
    longest = max(map(len, job["texts"])) + 1
    settings = {"n_ctx": longest, "n_batch": longest, "n_threads": job["threads"], "n_threads_batch": job["threads"]}
    model = llama_cpp.Llama(str(Path(job["target"]) / FILE), logits_all=True, verbose=False, **settings)
    for text in job["texts"]:
        model.reset()
        model.eval(text)
        yield model.scores[: len(text)]


def load(job: Job) -> dict[str, Decode]:
    """Returns a decoder, with a model, for each mode."""
    import numpy as np
    from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

    llama_cpp = _library()
    longest = max(len(prompt) for prompt in job["prompts"]) + job["max_new_tokens"]
    # Its caches are float16 otherwise.
    caches = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32} if job["form"] == "fp32" else {}

    def read(folder: str, drafter: LlamaDraftModel | None = None) -> Any:
        return llama_cpp.Llama(
            str(Path(folder) / FILE), n_ctx=longest + 2 * job["draft_tokens"] + 8, n_threads=job["threads"],
            n_threads_batch=job["threads"], draft_model=drafter, verbose=False, **caches,
        )  # fmt: skip

    class DraftModel(LlamaDraftModel):
        """Drafts greedily with another model; what it has computed of the text before is kept."""

        def __init__(self) -> None:
            self.model = read(job["draft"])

        def __call__(self, input_ids: Any, /, **kwargs: Any) -> Any:
            tokens = self.model.generate([int(token) for token in input_ids], top_k=1, temp=0.0, repeat_penalty=1.0)
            return np.array(list(itertools.islice(tokens, job["draft_tokens"])), dtype=np.intc)

    def drafter(mode: str) -> LlamaDraftModel | None:
        if mode == "ngram":
            return LlamaPromptLookupDecoding(max_ngram_size=NGRAM_SIZE, num_pred_tokens=job["draft_tokens"])
        return DraftModel() if mode == "draft_model" else None

    def decoder(mode: str) -> Decode:
        model = read(job["target"], drafter(mode))

        def decode(prompt: Sequence[int], max_new_tokens: int) -> Steps:
            model.reset()  # else it would keep the rows of a prompt that it has seen
            llama_cpp.llama_perf_context_reset(model.ctx)
            steps = Steps()
            for token in model.generate(list(prompt), top_k=1, temp=0.0, repeat_penalty=1.0):
                steps.add([token])
                if token in job["eos_token_ids"] or len(steps.tokens) == max_new_tokens:
                    break
            told = llama_cpp.llama_perf_context(model.ctx)
            steps.engine_s = (told.t_eval_ms + told.t_p_eval_ms) / 1e3
            return steps

        return decode

    return {mode: decoder(mode) for mode in job["modes"]}


if __name__ == "__main__":
    main(
        Peer(
            packages=("llama-cpp-python", "gguf"),
            forms={"stored": "the file itself", "fp32": "F32", "16bit": "BF16", "int8": "Q8_0", "int4": "Q4_0"},
            modes=("plain", "draft_model", "ngram"),
            convert=convert,
            load=load,
            logits=logits,
        )
    )
