# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 drafters on disk, and as the source of two graphs. Needs no torch before the export.

Layouts: the first release's (ours), numbered layers, and vLLM's speculators format. `d2t` holds offsets: draft token i
is the target's token i + d2t[i]. `t2d` marks the target's tokens that are drafted. Both are absent where the
vocabularies are one.

Layers of the target are counted from 0, and the residual stream after each of them is read. The published choice for
n layers are the streams before layers 2, n / 2 and n - 3. A checkpoint that names others means "after" if its first
number is 1, and "before" if it is 2 or more (SGLang reads them by the same rule).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from speccompile.checkpoints.checkpoint import read_config
from speccompile.checkpoints.folders import find_folder
from speccompile.checkpoints.tensor_files import SPECULATOR_FILES
from speccompile.core.jobs import GraphJob, SourceContext, WeightCounts
from speccompile.core.protocols import Engine
from speccompile.core.specs import GraphSpec
from speccompile.doctor.decoder_rows import decoder_config, decoder_rows, decoder_sizes, derive_decoder, times
from speccompile.doctor.findings import Finding
from speccompile.doctor.key_checks import COMMON
from speccompile.doctor.layouts import Case, Check, Format, Row, Size, Sizes, Target, finding, flag
from speccompile.errors import CheckpointError, RecipeError
from speccompile.export.checks import check_features
from speccompile.export.feature_source import FeatureSource, count_weights, holds
from speccompile.graph_kinds.features import FeatureDims, feature_draft_spec, fusion_spec
from speccompile.speculators.eagle3.speculators_config import (
    SCOPE,
    check_config,
    check_residual,
    config_from_ours,
    ours_from_config,
)

if TYPE_CHECKING:
    import onnx_ir as ir

    from speccompile.speculators.eagle3.config import DraftOptions

EMBEDDINGS = "embed_tokens.weight"
NUM_STREAMS = 3  # residual streams of the target that are fused
_IDS = ("eagle_aux_hidden_state_layer_ids", "eagle_config.eagle_aux_hidden_state_layer_ids")


def _derive(sizes: Sizes) -> None:
    derive_decoder(sizes)
    sizes["target_hidden"] = sizes["target_hidden"] or sizes["hidden"]
    sizes["fused"] = times(NUM_STREAMS, sizes["target_hidden"])
    sizes["two_hidden"] = times(2, sizes["hidden"])
    sizes["is_reduced"] = int(sizes["draft_vocab"] != sizes["vocab"])
    sizes["has_own_embedding"] = int(sizes["hidden"] != sizes["target_hidden"])
    sizes["num_states"] = NUM_STREAMS


def _check_maps(case: Case) -> Iterator[Finding]:
    """Yields findings unless d2t holds offsets, leads to tokens of the target, and agrees with t2d."""
    key, mask_key = case.key_of("d2t"), case.key_of("t2d")
    vocab, num = case.sizes.get("vocab"), case.sizes.get("draft_vocab")
    if key is None or vocab is None or num is None or case.files.headers[key].shape != (num,):
        return
    stored = case.files.array(key).astype(np.int64)
    tokens = stored + np.arange(num)
    is_set = bool((np.unique(tokens).size == num) and tokens.min() >= 0 and tokens.max() < vocab)
    if mask_key is not None and case.files.headers[mask_key].shape == (vocab,):
        yield from _compare_maps(case, key, stored, np.flatnonzero(case.files.array(mask_key)))
    elif case.sizes["is_reduced"] and (np.diff(stored) > 0).all() and stored.min() >= 0 and stored.max() < vocab:
        yield _absolute(case, key)
    elif not is_set:
        got = f"offsets that lead to {tokens.min()} .. {tokens.max()}, {num - np.unique(tokens).size} of them twice"
        expected, todo = f"{num} tokens of the {vocab}", "The map is another model's: fetch the folder again."
        yield finding("error", case.place(key), got, expected, todo)


def _compare_maps(case: Case, key: str, stored: np.ndarray, marked: np.ndarray) -> Iterator[Finding]:
    tokens = np.sort(stored + np.arange(len(stored)))
    if np.array_equal(tokens, marked):
        return
    if np.array_equal(np.sort(stored), marked):
        yield _absolute(case, key)
        return
    num = len(np.setxor1d(tokens, marked))
    got = f"a map to {len(np.unique(tokens))} tokens, while t2d marks {len(marked)}; {num} are in one of them only"
    todo = "One of them is another model's: fetch the folder again."
    yield finding("error", case.place(key), got, "the tokens that t2d marks", todo)


def _absolute(case: Case, key: str) -> Finding:
    got, expected = "token ids of the target", "offsets: draft token i is the target's i + d2t[i]"
    todo = "Subtract 0, 1, 2, ... from it, if its author says that it holds ids."
    return finding("error", case.place(key), got, expected, todo)


def _check_layers(case: Case) -> Iterator[Finding]:
    """Yields findings unless the fused states are three of the target's."""
    ids = layer_ids(case.config)
    if ids is None:
        return
    where = case.config_place(_IDS[0])
    last = case.target.dims.num_layers if case.target else None
    is_list = isinstance(ids, list) and all(type(i) is int for i in ids)
    if not is_list or len(ids) != NUM_STREAMS or len(set(ids)) != len(ids):
        todo = "Correct config.json; other loaders fall back to layers of their own choice."
        yield finding("error", where, repr(ids), f"{NUM_STREAMS} different layers", todo)
    elif min(ids) < 0 or (last is not None and max(ids) > last):
        most = "" if last is None else f" to {last}"
        todo = "It was trained for another target: give the model that it belongs to."
        yield finding("error", where, repr(ids), f"layers from 0{most}: the states before them", todo)


def layer_ids(config: Mapping[str, Any]) -> Any:
    """Returns the target's layers as a config states them; None where it does not."""
    nested = config.get("eagle_config")
    inner = nested.get(_IDS[0]) if isinstance(nested, Mapping) else None
    return config.get(_IDS[0]) if config.get(_IDS[0]) is not None else inner


def _ours(case: Case) -> dict[str, Any]:
    config, sizes = case.config, case.sizes
    ids = layer_ids(config)
    return {
        **decoder_config(config),
        "model_type": "llama",
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": sizes["num_layers"],
        "vocab_size": sizes["vocab"],
        "draft_vocab_size": sizes["draft_vocab"],
        "target_hidden_size": sizes["target_hidden"],
        "norm_before_residual": bool(config.get("norm_before_residual", False)),
        "norm_before_fc": bool(sizes["has_input_norm"]),
        **({"norm_output": True} if config.get("norm_output") else {}),
        "tie_word_embeddings": False,
        **({_IDS[0]: ids} if ids is not None else {}),
    }


def _config(config: Mapping[str, Any], target: Target | None) -> dict[str, Any]:
    return dict(config)


def _complete(config: Mapping[str, Any], tensors: dict[str, Any]) -> None:
    """Adds the mask that the map implies."""
    if "d2t" in tensors and "t2d" not in tensors:
        import torch

        tokens = tensors["d2t"].to(torch.int64) + torch.arange(config["draft_vocab_size"])
        tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill_(0, tokens, True)


def _sizes(scope: str = "") -> tuple[Size, ...]:
    """Returns the sizes, with those of the layer in an object of the config."""
    marks = ((r"^t2d$", 0), (r"^embed_tokens\.weight$", 0))
    return (
        *decoder_sizes(scope),
        Size("num_layers", (f"{scope}num_hidden_layers",), count=r"^layers\.(\d+)\.", default=1),
        Size("vocab", (f"{scope}vocab_size",), stored=marks),
        Size("draft_vocab", ("draft_vocab_size",), stored=((r"^lm_head\.weight$", 0),), is_needed=True),
        Size("target_hidden", ("target_hidden_size",), default=0, least=0),
        flag("has_input_norm", "norm_before_fc", present=r"^input_norm\.weight$"),
        flag("has_fc_norm", "fc_norm", present=r"^fc_norm\.\d+\.weight$"),
    )


def _rows(first: str) -> tuple[Row, ...]:
    """Returns the rows, with the beginning of the first layer's keys."""
    over = (("layer", "num_layers", 1),)
    maps = (("d2t", ("draft_vocab",), ("I64", "I32"), False), ("t2d", ("vocab",), ("BOOL",), True))
    return (
        Row("fc.weight", ("hidden", "fused")),
        Row("input_norm.weight", ("fused",), need="has_input_norm"),
        Row("fc_norm.{state}.weight", ("target_hidden",), (("state", "num_states", 0),), need="has_fc_norm"),
        Row(f"{first}.hidden_norm.weight", ("hidden",), name="midlayer.hidden_norm.weight"),
        *decoder_rows(first, name="midlayer", qkv_input="two_hidden"),
        *decoder_rows("layers.{layer}", over),
        Row("norm.weight", ("hidden",)),
        Row("lm_head.weight", ("draft_vocab", "hidden")),
        Row("embed_tokens.weight", ("vocab", "hidden"), need="has_own_embedding"),
        Row("embed_tokens.weight", ("vocab", "hidden"), need="!has_own_embedding", is_optional=True),
        *(Row(k, d, dtypes=t, need="is_reduced", is_derived=late) for k, d, t, late in maps),
        *(Row(k, d, dtypes=t, need="!is_reduced", is_optional=True) for k, d, t, _ in maps),
    )


_CHECKS = (*COMMON, Check("eagle3.maps", _check_maps), Check("eagle3.layers", _check_layers))
_NUMBERED = r"^layers\.0\.hidden_norm\.weight$"
_IGNORED = (r"rotary_emb\.inv_freq$", r"^verifier_(lm_head|norm)\.weight$")
FORMATS = (
    Format(
        "eagle3/ours",
        "EAGLE-3 drafter (first release, SpecForge)",
        "eagle3",
        _sizes(),
        _rows("midlayer"),
        _CHECKS,
        marks=(r"^midlayer\.",),
        prefixes=("", "model."),
        ignored=_IGNORED,
        derive=_derive,
        ours=_ours,
        config=_config,
        complete=_complete,
    ),
    Format(
        "eagle3/speculators",
        "EAGLE-3 drafter (speculators format)",
        "eagle3",
        _sizes(SCOPE),
        _rows("layers.0"),
        (*_CHECKS, Check("eagle3.config", check_config), Check("eagle3.residual", check_residual)),
        config_marks=(("speculators_model_type", "eagle3"),),
        ignored=_IGNORED,
        derive=_derive,
        ours=ours_from_config,
        config=config_from_ours,
        complete=_complete,
    ),
    Format(
        "eagle3/numbered",
        "EAGLE-3 drafter (numbered layers)",
        "eagle3",
        _sizes(),
        _rows("layers.0"),
        _CHECKS,
        marks=(_NUMBERED, r"^(d2t|t2d)$"),
        prefixes=("", "model."),
        ignored=_IGNORED,
        derive=_derive,
        ours=_ours,
        config=_config,
        complete=_complete,
    ),
)


def layers_of_target(
    model: str, config: str | None, asked: Sequence[int] | None, num_layers: int, weights: str
) -> tuple[int, ...]:
    """Returns the layers of a target, for its own graph and the speculator's.

    Args:
        model: of the speculator.
        config: see `GraphJob`.
        asked: by the recipe; None: as the checkpoint says, else the published choice.
        num_layers: of the target.
        weights: "checkpoint" or "random"; a random target may have fewer layers than the checkpoint's, which are then
            chosen anew.

    Raises:
        CheckpointError: the checkpoint names layers that the target does not have.
        RecipeError: the recipe does, or the target has too few.
    """
    if asked is not None:
        if len(set(asked)) != NUM_STREAMS or not all(0 <= i < num_layers for i in asked):
            expected = f"{NUM_STREAMS} different layers of the target's {num_layers}"
            raise RecipeError("speculator.layers", f"{list(asked)}", expected, "Correct the recipe.")
        return tuple(asked)
    folder = find_folder(GraphJob("draft", model, config=config), weights, SPECULATOR_FILES)
    named = layers_from_config(folder, read_config(folder))
    if named is None:
        return default_layers(num_layers, is_random=weights == "random")
    if max(named) < num_layers:
        return named
    if weights == "random":
        return default_layers(num_layers, is_random=True)
    got, expected = f"the stream after layer {max(named)}", f"one of the target's {num_layers} layers"
    todo = "It was trained for another target: give the model that it belongs to."
    raise CheckpointError(str(folder / "config.json"), got, expected, todo)


def layers_from_config(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Returns the layers that a config names; None where it names none.

    Raises:
        CheckpointError: they are not three different layers.
    """
    ids = layer_ids(config)
    if not ids:
        return None
    is_list = isinstance(ids, list) and all(type(i) is int and i >= 1 for i in ids)
    if not is_list or len(set(ids)) != NUM_STREAMS or len(ids) != NUM_STREAMS:
        expected = f"{NUM_STREAMS} different numbers from 1 on"
        todo = "Name the layers with speculator.layers; the embeddings themselves cannot be read."
        raise CheckpointError(f"{folder / 'config.json'} (eagle_aux_hidden_state_layer_ids)", repr(ids), expected, todo)
    return tuple(ids) if ids[0] == 1 else tuple(i - 1 for i in ids)


def default_layers(num_layers: int, *, is_random: bool = False) -> tuple[int, ...]:
    """Returns the published choice; small random targets have the first, a middle and the last layer.

    Raises:
        RecipeError: there are too few layers.
    """
    published = (1, num_layers // 2 - 1, num_layers - 4)
    if published[0] < published[1] < published[2]:
        return published
    if is_random and num_layers >= NUM_STREAMS:
        return (0, num_layers // 2, num_layers - 1)
    expected = f"{NUM_STREAMS if is_random else 7} layers or more"
    raise RecipeError("speculator.layers", f"a target of {num_layers} layers", expected, "Name three layers.")


class _Eagle3Source(FeatureSource):
    """Base of the sources of both graphs."""

    formats = FORMATS

    def __init__(self, job: GraphJob, context: SourceContext) -> None:
        super().__init__(job, context)
        num, asked = self.target.num_layers, job.options.layers
        layers = layers_of_target(job.model, job.config, asked, num, context.weights)
        self.dims: FeatureDims = replace(self.dims, layers=layers)
        nested = read_config(self.folder).get("eagle_config")
        if isinstance(nested, dict) and nested.get("use_aux_hidden_state") is False:
            where = f"{self.folder / 'config.json'} (eagle_config.use_aux_hidden_state)"
            todo = "This variant reads the last state alone and is not supported."
            raise CheckpointError(where, "false", "true: three states are fused", todo)


class DraftSource(_Eagle3Source):
    """See `speccompile.core.protocols.GraphSource`. The job has `DraftOptions`."""

    def __init__(self, job: GraphJob, context: SourceContext) -> None:
        super().__init__(job, context)
        self.needs_tables = self.is_random or not holds(self.folder, EMBEDDINGS)

    def counts(self) -> WeightCounts | None:
        """Returns the weight counts of these sizes."""
        return count_weights(self.dims, 2 * self.dims.hidden_size, 2 + 2 * self.dims.num_layers)

    def spec(self) -> GraphSpec:
        """Returns the inputs and outputs of the graph."""
        options: DraftOptions = self.job.options
        num = min(options.num_candidates, self.dims.draft_vocab_size)
        return feature_draft_spec(self.job.name, self.dims, num, options.gives_probs, self.max_rows)

    def export(self, progress: Callable[[str], None]) -> tuple[ir.Model, FeatureDims]:
        """Reads or makes the weights, and traces the graph."""
        from speccompile.checkpoints.target_tables import read_tables
        from speccompile.export.feature_draft import export_feature_draft
        from speccompile.speculators.eagle3.model import make_body

        progress("load weights")
        weights = self.read_weights()
        embeddings: Any = read_tables(self.context).embeddings if self.needs_tables else None
        body = make_body(self.config, self.dims, weights, embeddings)
        graph = export_feature_draft(body, self.spec(), self.max_rows, progress)
        return graph, replace(self.dims, num_params=sum(p.numel() for p in body.parameters()))


class FusionSource(_Eagle3Source):
    """See `speccompile.core.protocols.GraphSource`. The job has `FusionOptions`."""

    role = "fusion"
    needs_tables = False

    def __init__(self, job: GraphJob, context: SourceContext) -> None:
        super().__init__(job, context)
        self.max_rows = 0

    def counts(self) -> WeightCounts | None:
        """Returns the weight counts of these sizes; norms are left out."""
        num = NUM_STREAMS * self.dims.target_hidden_size * self.dims.hidden_size
        return WeightCounts(num, num, 0)

    def spec(self) -> GraphSpec:
        """Returns the inputs and outputs of the graph."""
        return fusion_spec(self.job.name, self.dims)

    def check_compiled(self, engine: Engine, max_nodes: int) -> dict[str, Any]:
        """See `speccompile.export.checks.check_features`."""
        return check_features(engine)

    def export(self, progress: Callable[[str], None]) -> tuple[ir.Model, FeatureDims]:
        """Reads or makes the weights, and traces the graph."""
        from speccompile.export.feature_draft import export_fusion
        from speccompile.speculators.eagle3.model import make_fusion

        progress("load weights")
        fusion = make_fusion(self.config, self.dims, self.read_weights())
        graph = export_fusion(fusion, self.spec(), progress)
        return graph, replace(self.dims, num_params=sum(p.numel() for p in fusion.parameters()))
