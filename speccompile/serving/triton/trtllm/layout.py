# SPDX-License-Identifier: Apache-2.0
"""Configurations of the five models; `tensorrt_llm` holds tokenizer and scheduler, the others serve old clients."""

from __future__ import annotations

from dataclasses import replace

from speccompile.serving.triton.config_text import ModelConfig, Step
from speccompile.serving.triton.settings import Settings
from speccompile.serving.triton.trtllm.contract import (
    ENGINE_NAMES,
    POSTPROCESSING_INPUTS,
    POSTPROCESSING_OUTPUTS,
    PREPROCESSING_INPUTS,
    PREPROCESSING_OUTPUTS,
    engine_inputs,
    engine_outputs,
    text_inputs,
    text_outputs,
)

ENGINE, PRE, POST, ENSEMBLE, BLS = "tensorrt_llm", "preprocessing", "postprocessing", "ensemble", "tensorrt_llm_bls"

# A text model's inputs that preprocessing reads, by their names there.
TO_PREPROCESSING = {
    "QUERY": "text_input",
    "REQUEST_OUTPUT_LEN": "max_tokens",
    "EMBEDDING_BIAS_WORDS": "embedding_bias_words",
    "EMBEDDING_BIAS_WEIGHTS": "embedding_bias_weights",
    "BAD_WORDS_DICT": "bad_words",
    "END_ID": "end_id",
    "PAD_ID": "pad_id",
}
# What preprocessing makes and the engine reads: engine's input -> preprocessing's output.
FROM_PREPROCESSING = {
    "input_ids": "INPUT_ID",
    "input_lengths": "REQUEST_INPUT_LEN",
    "request_output_len": "REQUEST_OUTPUT_LEN",
    "bad_words_list": "BAD_WORDS_IDS",
    "embedding_bias": "EMBEDDING_BIAS",
}


def trtllm_models(settings: Settings, max_batch_size: int, kind: str) -> dict[str, ModelConfig]:
    """Returns configurations by model name; `settings` are those of the model with the engine, `kind` where it runs."""
    engine = ModelConfig(
        ENGINE,
        engine_inputs(),
        engine_outputs(),
        is_decoupled=True,
        parameters=replace(settings, rules="trtllm").parameters(),
        kind=kind,
        comment=("Batching is done inside, between steps: keep one instance, and Triton's own batchers off.",),
    )
    models = {
        PRE: ModelConfig(
            PRE, PREPROCESSING_INPUTS, PREPROCESSING_OUTPUTS, parameters=Settings(part="preprocessing").parameters()
        ),
        ENGINE: engine,
        POST: ModelConfig(
            POST, POSTPROCESSING_INPUTS, POSTPROCESSING_OUTPUTS, parameters=Settings(part="postprocessing").parameters()
        ),
        ENSEMBLE: ModelConfig(ENSEMBLE, text_inputs(), text_outputs(), backend="", steps=ensemble_steps()),
        BLS: ModelConfig(
            BLS, text_inputs(), text_outputs(), is_decoupled=True, parameters=Settings(part="bls").parameters()
        ),
    }
    return {name: replace(model, max_batch_size=max_batch_size) for name, model in models.items()}


def engine_names() -> dict[str, str]:
    """Returns {text model's input: the engine's name} for the inputs that need no preprocessing."""
    texts = {tensor.name for tensor in text_inputs()}
    engine = {tensor.name for tensor in engine_inputs()}
    names = {name: ENGINE_NAMES.get(name, name) for name in texts}
    return {name: there for name, there in sorted(names.items()) if there in engine - set(FROM_PREPROCESSING)}


def ensemble_steps() -> list[Step]:
    """Returns the steps preprocessing, tensorrt_llm, postprocessing."""
    internal = {output: f"_{output}" for output in FROM_PREPROCESSING.values()}
    inner = {"output_ids": "_TOKENS_BATCH", "sequence_length": "_SEQUENCE_LENGTH", "text_output": "_TEXT"}
    passed = {tensor.name: tensor.name for tensor in text_outputs() if tensor.name not in inner}
    return [
        Step(PRE, TO_PREPROCESSING, internal),
        Step(
            ENGINE,
            {**{name: internal[output] for name, output in FROM_PREPROCESSING.items()}}
            | {there: name for name, there in engine_names().items()},
            {**inner, **passed},
        ),
        Step(
            POST,
            {"TOKENS_BATCH": "_TOKENS_BATCH", "SEQUENCE_LENGTH": "_SEQUENCE_LENGTH", "TEXT": "_TEXT"},
            {"OUTPUT": "text_output"},
        ),
    ]
