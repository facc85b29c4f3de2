# SPDX-License-Identifier: Apache-2.0
"""The parts of a manifest that the runtime reads: records with a type and a rule for each key, declared once."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from speccompile.bundle.rules import (
    ANY_OBJECT,
    DIM,
    FLAG,
    NUMBER,
    PATH,
    POSITIVE,
    TEXT,
    THREADS,
    TIME,
    Rule,
    an_object,
    closed,
    is_path,
    list_of,
    map_of,
    one_of,
    recorded,
    rule_from_record,
    whole,
)
from speccompile.core.specs import GraphSpec, Probe, spec_from_json


@dataclass(frozen=True, kw_only=True)
class EngineRecord:
    """The recipe's `engine` section of a bundle.

    Args:
        max_seq_len: tokens of a sequence at most, prompt included.
        max_draft_nodes: draft tokens scored in one step at most.
    """

    backend: str = recorded(TEXT)
    device: str = recorded(TEXT, default="cpu")
    max_batch_size: int = recorded(whole(1, 1024))
    max_seq_len: int = recorded(whole(1))
    max_draft_nodes: int = recorded(whole(0, 1024))
    threads: int | Literal["auto"] = recorded(THREADS, default="auto")


@dataclass(frozen=True, kw_only=True)
class TargetRecord:
    """The recipe's `target` section of a bundle.

    Args:
        model: the checkpoint's folder or hub id where it was built; None: not recorded.
        lora: folder or hub id of the adapter in its weights, if any.
    """

    model: str | None = recorded(TEXT, default=None)
    weights: str = recorded(TEXT, default="checkpoint")
    lora: str | None = recorded(TEXT, default=None)


@dataclass(frozen=True, kw_only=True)
class RecipeRecord:
    """The resolved recipe of a bundle.

    Args:
        speculator: `method` and the fields of its `Config`, as they were when the bundle was built.
        decoding: defaults of a request.
    """

    engine: EngineRecord = recorded(rule_from_record(EngineRecord))
    speculator: Mapping[str, Any] = recorded(an_object(method=TEXT))
    decoding: Mapping[str, Any] = recorded(ANY_OBJECT, default_factory=dict)
    target: TargetRecord = recorded(rule_from_record(TargetRecord), default=TargetRecord())

    @property
    def method(self) -> str:
        return str(self.speculator["method"])


@dataclass(frozen=True, kw_only=True)
class DimsRecord:
    """Sizes of a graph's model.

    Args:
        max_positions: most positions of the model; 0: not recorded, or without a bound.
    """

    max_positions: int = recorded(whole(0), default=0)


_TENSOR = closed(name=TEXT, dims=list_of(DIM), dtype=TEXT, may_probe=one_of(*typing.get_args(Probe)))
_SPEC = closed(
    name=TEXT, inputs=list_of(_TENSOR), outputs=list_of(_TENSOR), caches=list_of(TEXT), vocab_size=whole(0),
    may_max_rows=whole(0), may_draft_vocab=whole(0),
    may_borrowed=list_of(closed(name=TEXT, cache=TEXT, may_owner=TEXT)),
    may_rows_written_ahead=whole(0, 1024), may_reads_prompts=FLAG, may_scores=one_of("one", "nodes"),
    may_num_candidates=whole(0), may_num_drafts=whole(0), may_mask_token=whole(0), may_gives_probs=FLAG,
    may_tail=one_of("none", "verify", "candidates"),
    may_states=list_of(TEXT), may_max_pending=whole(0, 1025), may_conv_history=whole(0, 1024),
    may_state_trees=FLAG, may_image_tokens=whole(0, 65536), may_window=whole(0),
)  # fmt: skip


def _is_count(key: Any) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 6


_STEPS = Rule("milliseconds by number of nodes", lambda v: isinstance(v, dict) and all(map(_is_count, v)), items=TIME)


_DISTANCE = an_object(kl=TIME, top1=TIME, may_perplexity_change=NUMBER, may_perplexity_error=TIME)


@dataclass(frozen=True, kw_only=True)
class GraphRecord:
    """One graph of a bundle.

    Args:
        spec: its inputs and outputs, as JSON: see `graph_spec`.
        tuning: measured by the backend that compiled it; except for `threads` and `step_ms` only that backend reads it.
        max_rows: of its caches; 0: not recorded.
        form_distances: of quantised forms from float32, see `backends.distance.Distance`.
        calibration: of int4 weights: the text over which they were chosen.
    """

    file: str = recorded(PATH)
    spec: Mapping[str, Any] = recorded(_SPEC)
    role: str = recorded(TEXT, default="")
    tuning: Mapping[str, Any] = recorded(
        an_object(may_threads=whole(0, 1024), may_step_ms=_STEPS), default_factory=dict
    )
    max_rows: int = recorded(whole(0), default=0)
    op_histogram: Mapping[str, Any] = recorded(ANY_OBJECT, default_factory=dict)
    dims: DimsRecord = recorded(rule_from_record(DimsRecord), default=DimsRecord())
    form_distances: Mapping[str, Any] = recorded(map_of(_DISTANCE), default_factory=dict)
    calibration: Mapping[str, Any] = recorded(
        an_object(may_texts=TEXT, may_num_tokens=whole(0), may_num_linears=whole(0)), default_factory=dict
    )

    def graph_spec(self) -> GraphSpec:
        return spec_from_json(self.spec)


@dataclass(frozen=True, kw_only=True)
class ImageRecord:
    """How images of prompts are prepared for the vision tower, and which tokens stand for them.

    Args:
        begin_token_id: before them; in a text it marks where an image stands.
        resample: Pillow's number of the filter that resizes.
        scale: factor of the values 0 to 255.
    """

    image_size: int = recorded(whole(1, 8192))
    num_tokens: int = recorded(whole(1, 65536))
    begin_token_id: int = recorded(whole(0))
    image_token_id: int = recorded(whole(0))
    end_token_id: int = recorded(whole(0))
    resample: int = recorded(whole(0, 5))
    scale: float = recorded(POSITIVE)
    mean: Sequence[float] = recorded(list_of(NUMBER))
    std: Sequence[float] = recorded(list_of(POSITIVE))


MANIFEST_RULE = an_object(
    recipe=rule_from_record(RecipeRecord), versions=ANY_OBJECT, graphs=map_of(rule_from_record(GraphRecord)),
    eos_token_ids=list_of(whole(0)),
    files=Rule("an object", lambda v: isinstance(v, dict) and all(map(is_path, v)), items=an_object(
        sha256=TEXT, size_bytes=whole(0, 2**56))),
    stages=list_of(an_object(name=TEXT, may_seconds=TIME, may_peak_rss_bytes=whole(0, 2**56))),
    may_tokenizer=PATH, may_bos_token_id=whole(0), may_images=rule_from_record(ImageRecord),
)  # fmt: skip
