# SPDX-License-Identifier: Apache-2.0
"""The models `preprocessing` and `postprocessing` of the layout `trtllm`: a tokenizer, no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from speccompile.common.tokenizer_file import load_tokenizer
from speccompile.errors import BundleError, RuntimeFault, SpecCompileError
from speccompile.runtime.text import text_of_tokens
from speccompile.serving.triton.contract import Tensor
from speccompile.serving.triton.request_parsing import Arrays, text_from_value
from speccompile.serving.triton.settings import settings_from_args
from speccompile.serving.triton.trtllm.contract import POSTPROCESSING_INPUTS, PREPROCESSING_INPUTS, lists_from_words

Row = Mapping[str, NDArray[Any]]
Results = dict[str, NDArray[Any]]


class TokenizerPart:
    """What both have in common: requests in, as many responses out."""

    inputs: Sequence[Tensor] = ()

    def __init__(self, pb: Any, args: Mapping[str, str]) -> None:
        settings, config = settings_from_args(args)
        self._pb, self._has_batch = pb, int(config["max_batch_size"]) > 0
        self._tokenizer = load_tokenizer(Path(settings.tokenizer), BundleError, "Write the model repository again.")

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._respond(request) for request in requests]

    def finalize(self) -> None: ...

    def _respond(self, request: Any) -> Any:
        tensors = {t.name: self._pb.get_input_tensor_by_name(request, t.name) for t in self.inputs}
        arrays = {name: tensor.as_numpy() for name, tensor in tensors.items() if tensor is not None}
        try:
            outputs = results_from_arrays(self._row, arrays, self._has_batch)
        except SpecCompileError as fault:
            return self._pb.InferenceResponse(error=self._pb.TritonError(str(fault), self._pb.TritonError.INVALID_ARG))
        return self._pb.InferenceResponse([self._pb.Tensor(name, array) for name, array in outputs.items()])

    def _row(self, row: Row) -> Results:
        raise NotImplementedError


class Preprocessing(TokenizerPart):
    """Texts to ids."""

    inputs = PREPROCESSING_INPUTS

    def _row(self, row: Row) -> Results:
        return preprocess(row, self._tokenizer)


class Postprocessing(TokenizerPart):
    """Ids to texts."""

    inputs = POSTPROCESSING_INPUTS

    def _row(self, row: Row) -> Results:
        return postprocess(row, self._tokenizer)


def results_from_arrays(read: Any, arrays: Arrays, has_batch: bool) -> Results:
    """Returns the outputs of all rows of a batch; rows of different sizes are padded at their ends."""
    if not has_batch:
        single: Results = read(arrays)
        return single
    num = len(next(iter(arrays.values())))
    rows = [read({name: array[i] for name, array in arrays.items()}) for i in range(num)]
    return {name: _stacked([row[name] for row in rows]) for name in rows[0]}


def _stacked(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    size = max(array.shape[-1] for array in arrays)
    fill = b"" if arrays[0].dtype == np.object_ else 0
    return np.stack(
        [np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, size - a.shape[-1])], constant_values=fill) for a in arrays]
    )


def preprocess(row: Row, tokenizer: Tokenizer) -> Results:
    """Returns the outputs for one prompt. Raises RuntimeFault: it is not UTF-8, or a bias's parts do not match."""
    ids = tokenizer.encode(text_from_value(row["QUERY"].reshape(-1)[0], "QUERY")).ids
    return {
        "INPUT_ID": np.array(ids, dtype=np.int32),
        "REQUEST_INPUT_LEN": np.array([len(ids)], dtype=np.int32),
        "BAD_WORDS_IDS": lists_from_words(_words(row, "BAD_WORDS_DICT", tokenizer)),
        "STOP_WORDS_IDS": lists_from_words(_words(row, "STOP_WORDS_DICT", tokenizer)),
        "EMBEDDING_BIAS": _bias(row, tokenizer),
        "REQUEST_OUTPUT_LEN": row["REQUEST_OUTPUT_LEN"].astype(np.int32),
        "OUT_END_ID": row.get("END_ID", np.array([-1])).astype(np.int32),
        "OUT_PAD_ID": row.get("PAD_ID", np.array([-1])).astype(np.int32),
    }


def postprocess(row: Row, tokenizer: Tokenizer) -> Results:
    """Text of each sequence of a row: the text that came along, or the ids decoded."""
    if "TEXT" in row:
        return {"OUTPUT": row["TEXT"]}
    sequences, lengths = row["TOKENS_BATCH"], row["SEQUENCE_LENGTH"].reshape(-1)
    texts = [text_of_tokens(tokenizer, ids[:n].tolist()).encode() for ids, n in zip(sequences, lengths, strict=True)]
    return {"OUTPUT": np.array(texts, dtype=np.object_)}


def _words(row: Row, name: str, tokenizer: Tokenizer) -> list[list[int]]:
    words = [text_from_value(word, name) for word in row[name].reshape(-1)] if name in row else []
    return [list(tokenizer.encode(word, add_special_tokens=False).ids) for word in words if word]


def _bias(row: Row, tokenizer: Tokenizer) -> NDArray[np.float32]:
    name = "EMBEDDING_BIAS_WORDS"
    words = [text_from_value(word, name) for word in row[name].reshape(-1)] if name in row else []
    weights = row["EMBEDDING_BIAS_WEIGHTS"].reshape(-1).tolist() if "EMBEDDING_BIAS_WEIGHTS" in row else []
    if not any(words):
        return np.zeros(1, dtype=np.float32)
    if len(weights) != len(words):
        got = f"{len(words)} words, {len(weights)} weights"
        raise RuntimeFault("embedding_bias_words, embedding_bias_weights", got, "one weight a word", "Correct them.")
    bias = np.zeros(tokenizer.get_vocab_size(), dtype=np.float32)
    for word, weight in zip(words, weights, strict=True):
        bias[list(tokenizer.encode(word, add_special_tokens=False).ids)] += weight
    return bias
