# SPDX-License-Identifier: Apache-2.0
"""The parts of a manifest that the runtime reads: types and ranges of each key, declared once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator, with_config
from typing_extensions import TypedDict

from speccompile.common.json_reader import whole_number
from speccompile.core.specs import GraphSpec, Probe, spec_from_json

_MAX_COUNT = 2**31 - 1
_MAX_NAME_BYTES = 255
_OPEN, _CLOSED = (ConfigDict(strict=True, allow_inf_nan=False, extra=extra) for extra in ("allow", "forbid"))


def _text(value: str) -> str:
    if "\0" in value:
        raise ValueError("a text without null characters")
    return value


def _path(value: str) -> str:
    if any(len(part.encode()) > _MAX_NAME_BYTES for part in _text(value).split("/")):
        raise ValueError("a relative path")
    return value


def _dim(value: Any) -> Any:
    if not (isinstance(value, str) and "\0" not in value) and whole_number(value, 0, _MAX_COUNT) is None:
        raise ValueError("a size, or a dim by name")
    return value


def _threads(value: Any) -> Any:
    if value != "auto" and whole_number(value, 1, 1024) is None:
        raise ValueError("'auto', or threads from 1 to 1024")
    return value


def _num_nodes(value: str) -> str:
    if not (value.isascii() and value.isdigit() and len(value) <= 6):
        raise ValueError("a number of nodes")
    return value


Text = Annotated[str, AfterValidator(_text)]
PathText = Annotated[str, AfterValidator(_path)]
Dim = Annotated[Any, AfterValidator(_dim)]
Count = Annotated[int, Field(ge=0, le=_MAX_COUNT)]
SmallCount = Annotated[int, Field(ge=0, le=1024)]
NumBytes = Annotated[int, Field(ge=0, le=2**56)]
Time = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Steps = dict[Annotated[str, AfterValidator(_num_nodes)], Time]  # milliseconds by number of nodes


class Record(BaseModel):
    """A section whose unknown keys are ignored: a key with a default may be missing or null."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class EngineRecord(Record):
    """The recipe's `engine` section of a bundle."""

    backend: Text
    device: Text = "cpu"
    max_batch_size: Annotated[int, Field(ge=1, le=1024)]
    max_seq_len: Annotated[int, Field(ge=1, le=_MAX_COUNT)]  # tokens of a sequence at most, prompt included
    max_draft_nodes: SmallCount  # draft tokens scored in one step at most
    threads: Annotated[Any, AfterValidator(_threads)] = "auto"
    synthetic_acceptance: list[Annotated[float, Field(ge=0, le=1)]] = []


class TargetRecord(Record):
    """The recipe's `target` section of a bundle."""

    model: Text | None = None  # the checkpoint's folder or hub id where it was built; None: not recorded
    weights: Text = "checkpoint"
    lora: Text | None = None  # folder or hub id of the adapter in its weights, if any
    adapters: dict[str, Text] = {}  # those that a request may choose, by name


@with_config(_OPEN)
class SpeculatorSection(TypedDict):
    """`method` and the fields of its `Config`, as they were when the bundle was built."""

    method: Text


class RecipeRecord(Record):
    """The resolved recipe of a bundle."""

    engine: EngineRecord
    speculator: SpeculatorSection
    decoding: dict[str, Any] = {}
    target: TargetRecord = TargetRecord()

    @property
    def method(self) -> str:
        return self.speculator["method"]


class DimsRecord(Record):
    """Sizes of a graph's model."""

    max_positions: Count = 0  # most positions of the model; 0: not recorded, or without a bound


@with_config(_CLOSED)
class TensorRow(TypedDict):
    """One input or output, as `GraphSpec` writes it."""

    name: Text
    dims: list[Dim]
    dtype: Text
    probe: NotRequired[Probe | None]


@with_config(_CLOSED)
class BorrowedRow(TypedDict):
    """One cache of another graph, as `GraphSpec` writes it."""

    name: Text
    cache: Text
    owner: NotRequired[Text | None]


@with_config(_CLOSED)
class SpecRow(TypedDict):
    """Inputs and outputs, as `GraphSpec` writes them."""

    name: Text
    inputs: list[TensorRow]
    outputs: list[TensorRow]
    caches: list[Text]
    vocab_size: Count
    max_rows: NotRequired[Count | None]
    draft_vocab: NotRequired[Count | None]
    borrowed: NotRequired[list[BorrowedRow] | None]
    rows_written_ahead: NotRequired[SmallCount | None]
    reads_prompts: NotRequired[bool | None]
    scores: NotRequired[Literal["one", "nodes"] | None]
    num_candidates: NotRequired[Count | None]
    num_drafts: NotRequired[Count | None]
    mask_token: NotRequired[Count | None]
    gives_probs: NotRequired[bool | None]
    tail: NotRequired[Literal["none", "verify", "candidates"] | None]
    states: NotRequired[list[Text] | None]
    max_pending: NotRequired[Annotated[int, Field(ge=0, le=1025)] | None]
    conv_history: NotRequired[SmallCount | None]
    state_trees: NotRequired[bool | None]
    state_owner: NotRequired[Text | None]
    image_tokens: NotRequired[Annotated[int, Field(ge=0, le=65536)] | None]
    window: NotRequired[Count | None]


@with_config(_OPEN)
class DistanceRow(TypedDict):
    """As `backends.distance.Distance` writes it."""

    kl: Time
    top1: Time
    perplexity_change: NotRequired[float | None]
    perplexity_error: NotRequired[Time | None]


@with_config(_OPEN)
class TuningRow(TypedDict):
    """What a backend measured; it alone reads the other keys."""

    threads: NotRequired[SmallCount | None]
    step_ms: NotRequired[Steps | None]


@with_config(_OPEN)
class CalibrationRow(TypedDict):
    """The text over which int4 weights were chosen."""

    texts: NotRequired[Text | None]
    num_tokens: NotRequired[Count | None]
    num_linears: NotRequired[Count | None]


@with_config(_OPEN)
class AdapterRow(TypedDict):
    """A LoRA adapter that a request may choose; the number in the graph is its place, from 1 on."""

    name: Text


class GraphRecord(Record):
    """One graph of a bundle."""

    file: PathText
    spec: SpecRow
    role: Text = ""
    tuning: TuningRow = TuningRow()
    max_rows: Count = 0  # of its caches; 0: not recorded
    op_histogram: dict[str, Any] = {}
    dims: DimsRecord = DimsRecord()
    form_distances: dict[Text, DistanceRow] = {}  # of quantised forms from float32, by form
    calibration: CalibrationRow = CalibrationRow()
    adapters: list[AdapterRow] = []

    def graph_spec(self) -> GraphSpec:
        return spec_from_json(self.spec)


class ImageRecord(Record):
    """How images of prompts are prepared for the vision tower, and which tokens stand for them."""

    image_size: Annotated[int, Field(ge=1, le=8192)]
    num_tokens: Annotated[int, Field(ge=1, le=65536)]
    begin_token_id: Count  # before them; in a text it marks where an image stands
    image_token_id: Count
    end_token_id: Count
    resample: Annotated[int, Field(ge=0, le=5)]  # Pillow's number of the filter that resizes
    scale: Positive  # factor of the values 0 to 255
    mean: Sequence[float]
    std: Sequence[Positive]


@with_config(_OPEN)
class FileRow(TypedDict):
    """Digest and size of a file."""

    sha256: Text
    size_bytes: NumBytes


@with_config(_OPEN)
class StageRow(TypedDict):
    """Time and memory of a stage of the build."""

    name: Text
    seconds: NotRequired[Time | None]
    peak_rss_bytes: NotRequired[NumBytes | None]


class Manifest(Record):
    """All that is read of a manifest."""

    recipe: RecipeRecord
    versions: dict[str, Any]
    graphs: dict[Text, GraphRecord]
    eos_token_ids: list[Count]
    files: dict[PathText, FileRow]
    stages: list[StageRow]
    tokenizer: PathText | None = None
    bos_token_id: Count | None = None
    images: ImageRecord | None = None


def closed_keys(path: Sequence[int | str]) -> list[str]:
    """Returns the keys of the closed section at a path of the manifest, e.g. ("graphs", "target", "spec")."""
    name = next((part for part in reversed(path) if isinstance(part, str)), "")
    rows = {"inputs": TensorRow, "outputs": TensorRow, "borrowed": BorrowedRow}
    return sorted(rows.get(name, SpecRow).__annotations__)
