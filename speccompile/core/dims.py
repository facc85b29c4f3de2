# SPDX-License-Identifier: Apache-2.0
"""The sizes of a decoder, and what each of its layers keeps of a sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self, TypeVar

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}  # of activations and caches
INT8_CACHE_GROUP = 32  # columns of a row of an int8 cache with one float32 scale; the last may be fewer
DimsT = TypeVar("DimsT")


@dataclass(frozen=True)
class RecurrentDims:
    """Sizes of what a recurrent layer keeps of a sequence, however long it is."""

    num_key_heads: int  # Hk, heads of the queries and keys; of Mamba 2 its groups
    num_value_heads: int  # Hv, a multiple of Hk, of values and the state; 0: only the rows of a convolution are kept
    key_dim: int  # dk, columns of a query or key head; of Mamba 2 the size of its state
    value_dim: int
    conv_channels: int  # C, columns of the rows that its causal convolution reads
    conv_kernel: int  # K, rows that the convolution sees, the present one included

    @property
    def has_state(self) -> bool:
        return self.num_value_heads > 0

    @property
    def num_states(self) -> int:
        return 3 if self.has_state else 1

    @property
    def pending_width(self) -> int:
        """Columns of a pending row: k | v | g | beta, with k normalised."""
        return self.num_key_heads * self.key_dim + self.num_value_heads * (self.value_dim + 2)

    def slot_bytes(self, max_pending: int) -> int:
        """Returns the bytes of the layer's states of one slot with `max_pending` rows, float32 in every precision."""
        state = self.num_value_heads * self.key_dim * self.value_dim
        conv_rows = (self.conv_kernel - 1 + max_pending) * self.conv_channels
        return 4 * (state + max_pending * self.pending_width + conv_rows)


@dataclass(frozen=True)
class LayerDims:
    """What one layer keeps of a sequence: K and V rows, a recurrent state, both, or nothing."""

    num_kv_heads: int = 0  # of its K and V; 0: it has none
    head_dim: int = 0
    recurrent: RecurrentDims | None = None  # sizes of its recurrent state; None: it has none
    is_latent: bool = False  # V of a row is the first columns of its K, and one cache holds both
    source: int | None = None  # a layer before it whose K and V it reads; None: it reads its own, or none

    @property
    def num_caches(self) -> int:
        return (1 if self.is_latent else 2) if self.num_kv_heads else 0


@dataclass(frozen=True)
class ModelDims:
    """The sizes of a decoder that graphs, caches and predictions need."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    num_params: int = 0
    layer_dims: tuple[LayerDims, ...] = ()  # what each layer keeps; empty: all K and V of `num_kv_heads`, `head_dim`

    @property
    def per_layer(self) -> tuple[LayerDims, ...]:
        uniform = LayerDims(self.num_kv_heads, self.head_dim)
        return self.layer_dims[: self.num_layers] or (uniform,) * self.num_layers

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.per_layer) if layer.num_kv_heads)

    @property
    def latent_layers(self) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.per_layer) if layer.num_caches == 1)

    @property
    def sources(self) -> dict[int, int]:
        return {i: layer.source for i, layer in enumerate(self.per_layer) if layer.source is not None}

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.per_layer) if layer.recurrent is not None)

    def kept(self, layers: Sequence[int]) -> Self:
        """Returns the sizes of the model with these layers alone, none of which reads the caches of another."""
        return replace(
            self, num_layers=len(layers), layer_dims=tuple(self.layer_dims[i] for i in layers if self.layer_dims)
        )

    @property
    def cache_row_bytes(self) -> int:
        """Bytes of K and V, all layers, of one token of one slot in float32."""
        return self.cache_row_bytes_in("float32")

    def cache_row_bytes_in(self, dtype: str) -> int:
        """Returns the bytes of K and V of one token of one slot; `dtype` is of `DTYPE_BYTES`, or int8 with scales."""
        heads = [(layer.num_caches * layer.num_kv_heads, layer.head_dim) for layer in self.per_layer]
        columns = sum(num * width for num, width in heads)
        if dtype != "int8":
            return DTYPE_BYTES[dtype] * columns
        return columns + 4 * sum(num * -(-width // INT8_CACHE_GROUP) for num, width in heads)

    def state_bytes(self, max_pending: int) -> int:
        """Returns the bytes of the recurrent states of one slot, all layers, whatever its length."""
        return sum(layer.recurrent.slot_bytes(max_pending) for layer in self.per_layer if layer.recurrent is not None)


def json_from_dims(dims: Any) -> dict[str, Any]:
    """Returns the sizes of a graph as a JSON-ready dict; `layer_dims` is left out where all layers are alike."""
    data: dict[str, Any] = asdict(dims)
    if data.get("layer_dims") == ():
        del data["layer_dims"]
    return data


def dims_from_json(kind: type[DimsT], data: Mapping[str, Any]) -> DimsT:
    """Returns the sizes of a dict that `json_from_dims` made."""
    layers = tuple(_layer_from_json(row) for row in data.get("layer_dims", ()))
    return kind(**({**data, "layer_dims": layers} if layers else data))


def _layer_from_json(row: Mapping[str, Any]) -> LayerDims:
    sizes = row["recurrent"]
    recurrent = None if sizes is None else RecurrentDims(**sizes)
    latent, source = row.get("is_latent", False), row.get("source")
    return LayerDims(row["num_kv_heads"], row["head_dim"], recurrent, latent, source)
