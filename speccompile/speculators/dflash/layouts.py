# SPDX-License-Identifier: Apache-2.0
"""Layouts of block drafters on disk: sizes, keys, configs, checks. Needs no torch.

z-lab's layer number i is the output of layer i, that of the speculators format the output of layer i - 1. One that is
off by one still drafts, only worse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from speccompile.checkpoints import target_tables
from speccompile.doctor.decoder_rows import (
    decoder_config,
    decoder_reads,
    decoder_rows,
    decoder_sizes,
    derive_decoder,
    speculators_format,
    times,
)
from speccompile.doctor.findings import Finding
from speccompile.doctor.key_checks import COMMON
from speccompile.doctor.layouts import Case, Check, Format, Row, Size, Sizes, Target, finding, flag, unchanged
from speccompile.errors import CheckpointError
from speccompile.speculators.dflash.drafter import (
    CORRECTED,
    CORRECTOR_KEYS,
    DOMINO,
    NESTED,
    drafter_from_config,
    has_path,
    is_corrected,
    is_dspark,
    published_layers,
    value_of,
    variant_of,
)
from speccompile.speculators.dflash.head_rows import (
    check_corrector,
    check_path,
    corrector_rows,
    corrector_sizes,
    derive_corrector,
    derive_path,
    path_rows,
    path_sizes,
)

METHOD, SCOPE, EMBEDDINGS, LM_HEAD = "dflash", "transformer_layer_config", "embed_tokens.weight", "lm_head.weight"
LAYERS, AUX_LAYERS = "target_layer_ids", "aux_hidden_state_layer_ids"
PREDECESSORS, SUCCESSORS = (f"candidate_selector.{kind}_codebook" for kind in ("predecessor", "successor"))
_TYPES = ("dflash", "dflash2", "dspark", "jetspec")  # of the speculators format
_NAMES = ("DFlashDraftModel", "DFlash2DraftModel", "DFlashSpeculator", "DSparkDraftModel", CORRECTED, DOMINO)
_TODO = "Correct config.json, or override it with --set."
# Of our config, what is in `dflash_config`.
_OWN = (
    *("block_size", "mask_token_id", "sample_from_anchor", "input_embedding_scale", "output_multiplier"),
    *("final_logit_softcapping", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    *("markov_rank", "markov_head_type", "projector_type", "lilicorr_enabled", "attention_sink_bias"),
    *("shift_label", "emb_dim", "gru_hidden_dim", "pure_draft_prefix_len"),
    *("attention_k_eq_v", *(key for key, _ in CORRECTOR_KEYS.values())),
)
_HERE = (*_OWN, LAYERS, "is_causal", "causal", "causal_head", "use_swa", "swa_window_size")  # of z-lab's layout
_OF_LAYERS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "model_type")


def _sizes(scope: str = "") -> tuple[Size, ...]:
    """Returns the sizes, with those of the layers in an object of the config."""

    def own(name: str) -> tuple[str, ...]:
        return (f"{NESTED}.{name}", name)

    return (
        *decoder_sizes(scope),
        Size("num_layers", (f"{scope}num_hidden_layers",), count=r"^layers\.(\d+)\."),
        Size("vocab", (f"{scope}vocab_size",)),
        Size("draft_vocab", ("draft_vocab_size",), default=0, least=0),
        Size("target_hidden", ("target_hidden_size",), default=0, least=0),
        Size("fused", stored=((r"^fc\.weight$", 1),), default=0, least=0),
        Size("block", own("block_size"), least=2),
        Size("mask_token", own("mask_token_id"), least=0),
        Size("taps", own("conv_kernel_size"), stored=((r"attention_conv\.base_kernel$", 1),), default=0, least=0),
        Size("group", own("conv_group_size"), default=16),
        Size("rank", own("selector_rank"), stored=((r"_codebook(\.weight)?$", 1),), default=0, least=0),
        Size("markov", own("markov_rank"), stored=((r"markov_w1\.weight$", 1),), default=0, least=0),
        flag("has_confidence", present=r"^confidence_head\.proj\."),
        flag("has_named_codebooks", present=r"_codebook\.weight$"),
        flag("has_map", present=r"^d2t$"),
        *corrector_sizes(),
        *path_sizes(),
    )


def _derive(sizes: Sizes) -> None:
    derive_decoder(sizes)
    hidden = sizes["hidden"]
    sizes["draft_vocab"] = sizes["draft_vocab"] or sizes["vocab"]
    sizes["target_hidden"] = sizes["target_hidden"] or hidden
    streams, width = sizes["fused"], sizes["target_hidden"]
    sizes["num_states"] = streams // width if streams and width and streams % width == 0 else None
    if not sizes["num_states"]:
        sizes["fused"] = None
    per_row = times(2, sizes["taps"], hidden)
    sizes["conv_outputs"] = per_row // (sizes["group"] or 1) if per_row else None
    sizes["is_reduced"] = int(sizes["draft_vocab"] != sizes["vocab"])
    named = sizes["has_named_codebooks"]
    sizes["has_bare"], sizes["has_named"] = int(bool(sizes["rank"]) and not named), int(bool(named))
    sizes["confidence_inputs"] = None  # it may read the row of the Markov table as well
    derive_corrector(sizes)
    derive_path(sizes)


def _rows() -> tuple[Row, ...]:
    over = (("i", "num_layers", 0),)

    def conv(name: str) -> tuple[Row, ...]:
        stem = f"layers.{{i}}.{name}"
        return (
            Row(f"{stem}.base_kernel", (2, "taps", "hidden"), over, need="taps"),
            Row(f"{stem}.kernel_projection.weight", ("conv_outputs", "hidden"), over, need="taps"),
        )

    books = ((PREDECESSORS, "vocab"), (SUCCESSORS, "draft_vocab"))
    return (
        Row("fc.weight", ("hidden", "fused")),
        Row("hidden_norm.weight", ("hidden",)),
        Row("norm.weight", ("hidden",)),
        *decoder_rows("layers.{i}", over),
        *(Row(f"layers.{{i}}.self_attn.{p}_norm.weight", ("head_dim",), over) for p in "qk"),
        *conv("attention_conv"),
        *conv("mlp_conv"),
        *(Row(key, (tokens, "rank"), need="has_bare") for key, tokens in books),
        *(Row(f"{key}.weight", (tokens, "rank"), name=key, need="has_named") for key, tokens in books),
        Row("candidate_selector.hidden_projection.weight", ("rank", "hidden"), need="rank"),
        Row("markov_head.markov_w1.weight", ("vocab", "markov"), need="markov"),
        Row("markov_head.markov_w2.weight", ("draft_vocab", "markov"), need="markov"),
        Row("confidence_head.proj.weight", (1, "confidence_inputs"), need="has_confidence"),
        Row("confidence_head.proj.bias", (1,), need="has_confidence", is_optional=True),
        Row(EMBEDDINGS, ("vocab", "hidden"), is_optional=True, table=target_tables.EMBEDDINGS),
        Row(LM_HEAD, ("draft_vocab", "hidden"), is_optional=True, table=target_tables.LM_HEAD),
        Row("d2t", ("draft_vocab",), dtypes=("I64", "I32"), need="has_map"),
        Row("t2d", ("vocab",), dtypes=("BOOL",), need="has_map", is_optional=True),
        *corrector_rows(),
        *path_rows(),
    )


def _canonical_config(case: Case) -> dict[str, Any]:
    """Returns our config of one in z-lab's layout, or DSpark's."""
    config, sizes = case.config, case.sizes
    own: dict[str, Any] = {name: value_of(config, name) for name in _OWN}
    if own["sample_from_anchor"] is None:  # Domino calls it `shift_label`; released DSpark drafters do not state it
        shift = own["shift_label"] if has_path(config) or is_dspark(config) else None
        own["sample_from_anchor"] = is_dspark(config) and not has_path(config) if shift is None else bool(shift)
    made = _made(config, sizes, own)
    for name in ("is_causal", "causal", "causal_head"):
        if (stated := value_of(config, name)) is not None:
            made["is_causal"] = bool(stated)
    if value_of(config, "use_swa") and value_of(config, "swa_window_size"):
        num = int(sizes["num_layers"] or 0)
        made |= {"layer_types": ["sliding_attention"] * num, "sliding_window": value_of(config, "swa_window_size")}
        made |= {"use_sliding_window": True, "is_causal": bool(made.get("is_causal"))}
    if value_of(config, LAYERS) is not None:
        made[NESTED][LAYERS] = value_of(config, LAYERS)
    return made


def _canonical_from_speculators(case: Case) -> dict[str, Any]:
    """Returns our config of one in the speculators format."""
    config, sizes = case.config, case.sizes
    own: dict[str, Any] = {name: config.get(name) for name in _OWN}
    kind = config.get("speculators_model_type")
    if kind == "dflash2":
        defaults = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
        own |= {name: value for name, value in defaults.items() if own[name] is None}
    layer = config.get(SCOPE)
    made = _made(layer if isinstance(layer, Mapping) else {}, sizes, own)
    if config.get("sliding_window_non_causal", kind == "dflash2") is True:
        made["is_causal"] = False
    if kind == "jetspec":
        made["is_causal"] = True
    ids = config.get(AUX_LAYERS)
    if isinstance(ids, list) and all(type(i) is int for i in ids):
        made[NESTED][LAYERS] = [i - 1 for i in ids]
    elif ids is not None:
        made[NESTED][LAYERS] = ids
    return made


def _made(layer: Mapping[str, Any], sizes: Sizes, own: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: layer[name] for name in _OF_LAYERS if layer.get(name) is not None}
    is_second = bool(own["selector_rank"] or sizes["rank"])
    name = "DFlash2DraftModel" if is_second else "DFlashDraftModel"
    whole = {"architectures": layer.get("architectures"), **own}
    if is_corrected(whole) or has_path(whole):
        name = CORRECTED if is_corrected(whole) else DOMINO
    return {
        "model_type": "qwen3",
        **decoder_config(layer),
        **kept,
        "architectures": [name],
        "num_hidden_layers": sizes["num_layers"],
        "vocab_size": sizes["vocab"],
        "draft_vocab_size": sizes["draft_vocab"],
        "target_hidden_size": sizes["target_hidden"],
        "tie_word_embeddings": False,
        NESTED: {name: value for name, value in own.items() if value is not None},
    }


def _config_of_speculators(config: Mapping[str, Any], target: Target | None) -> dict[str, Any]:
    """Returns the config of the speculators format.

    Raises:
        CheckpointError: no target is named, or the drafter computes in a way that the format does not state.
    """
    if is_corrected(config) or has_path(config):
        got, expected = "LiLiCorr" if is_corrected(config) else "Domino", "a drafter of a kind that the format has"
        raise CheckpointError("config.json (architectures)", got, expected, "Keep it in our own layout.")
    own = dict(config[NESTED])
    for name, neutral in (("output_multiplier", 1.0), ("input_embedding_scale", 1.0), ("final_logit_softcapping", 0)):
        if (value := own.pop(name, neutral)) not in (neutral, None):
            expected = f"{neutral}, as readers of the format assume"
            raise CheckpointError(f"config.json ({name})", repr(value), expected, "Keep it in our own layout.")
    kind = "dflash2" if own.get("selector_rank") else "dspark" if "markov_rank" in own else "dflash"
    drafts = drafter_from_config("config.json", config).max_drafts
    layer = {name: config[name] for name in _OF_LAYERS if name in config}
    ids = own.pop(LAYERS, None)
    return {
        "architectures": ["DFlash2DraftModel" if kind == "dflash2" else "DFlashSpeculator"],
        **speculators_format(kind, "0.5.0", target, {"speculative_tokens": drafts}),
        SCOPE: {**decoder_config(config), **layer},
        "draft_vocab_size": config["draft_vocab_size"],
        "target_hidden_size": config["target_hidden_size"],
        "sliding_window_non_causal": config.get("is_causal") is False,
        **({} if ids is None else {AUX_LAYERS: [i + 1 for i in ids]}),
        **own,
    }


def _check_variant(case: Case) -> Iterator[Finding]:
    if (fault := variant_of(case.config)) is not None:
        name, got, expected = fault
        yield finding("error", case.where_in_config(name), got, expected, "Use a DFlash or DFlash 2 drafter.")
    for part, label in (("gate_proj", "a gated Markov head"), ("joint_proj", "a Markov head with a state")):
        if (key := f"{case.prefix}markov_head.{part}.weight") in case.files.headers:
            yield finding("error", case.where(key), label, "a table", _TODO)


def _check_layers(case: Case) -> Iterator[Finding]:
    """Yields findings unless the streams are layers of the target, in this layout's way of counting."""
    is_zlab = case.layout.name == "dflash/ours"
    name, other = (LAYERS, AUX_LAYERS) if is_zlab else (AUX_LAYERS, LAYERS)
    ids, num, first = value_of(case.config, name), case.sizes["num_states"], 0 if is_zlab else 1
    where = case.where_in_config(name)
    if ids is None:
        if num:
            todo = "Add them, or give speculator.layers; the published choice for the target's depth is taken else."
            yield finding("warning", where, "nothing", f"{num} layers of the target", todo)
        return
    is_list = isinstance(ids, list) and all(type(i) is int for i in ids)
    if not is_list or len(set(ids)) != len(ids) or (num is not None and len(ids) != num):
        yield finding("error", where, repr(ids), f"{num} different layers, as fc reads", _TODO)
        return
    most = None if case.target is None else case.target.dims.num_layers - 1 + first
    if min(ids) < first or (most is not None and max(ids) > most):
        last = "" if most is None else f" to {most}"
        meaning = "outputs of these layers" if is_zlab else "states before these layers"
        todo = f"{other} counts {'one more' if is_zlab else 'one less'}: use that key if its author meant so."
        yield finding("error", where, repr(ids), f"numbers from {first}{last}: {meaning}", todo)
    elif case.target is not None:
        usual = [i + first for i in published_layers(case.target.dims.num_layers, len(ids))]
        shift = 1 if is_zlab else -1
        if ids != usual and [i - shift for i in ids] == usual:
            todo = f"Check its author's code: {other} counts otherwise; drafts off by one layer are accepted less."
            yield finding("warning", where, repr(ids), f"{usual}, the published choice for this depth", todo)


def _check_numbers(case: Case) -> Iterator[Finding]:
    """Yields findings for what a config says twice or not at all, and for the mask's token."""
    vocab, mask = case.sizes["vocab"], case.sizes["mask_token"]
    if vocab and mask is not None and mask >= vocab:
        yield finding("error", case.where_in_config("mask_token_id"), f"{mask}", f"a token below {vocab}", _TODO)
    nested = case.config.get(NESTED)
    for name in (*_OWN, LAYERS):
        inner, outer = nested.get(name) if isinstance(nested, Mapping) else None, case.config.get(name)
        if inner is not None and outer is not None and inner != outer:
            got = f"{outer!r} at the top and {inner!r} in {NESTED}"
            yield finding("error", case.where_in_config(name), got, "one value", _TODO)
    kind = case.config.get("speculators_model_type")
    if kind == "dspark" and not isinstance(anchor := case.config.get("sample_from_anchor"), bool):
        todo = "vLLM takes false, the speculators library true: give what it was trained with, in config.json or --set."
        yield finding("error", case.where_in_config("sample_from_anchor"), repr(anchor), "true or false", todo)
    if case.target is None:
        return
    stated = case.target.config
    scaled = next((n for n in ("logits_scaling", "logit_scale", "final_logit_softcapping") if stated.get(n)), None)
    given = [value_of(case.config, name) for name in ("output_multiplier", "final_logit_softcapping")]
    if scaled and given == [None, None]:
        got, expected = "nothing", f"how its logits are scaled: the target's config has {scaled}"
        todo = "Ask its author: likeliest drafts stay the same without it, drawn ones do not."
        yield finding("warning", case.where_in_config("output_multiplier"), got, expected, todo)


def _check_codebooks(case: Case) -> Iterator[Finding]:
    if case.sizes["has_named"]:
        got, expected = "codebooks stored as `.weight`", f"{PREDECESSORS} and {SUCCESSORS}, as released"
        todo = "It is read here; other engines look for the bare names: convert it."
        yield finding("warning", case.where(f"{case.prefix}{PREDECESSORS}.weight"), got, expected, todo)


def _check_tables(case: Case) -> Iterator[Finding]:
    if case.sizes["is_reduced"]:
        for name in ("d2t", LM_HEAD):
            if case.key_of(name) is None:
                expected = f"the {name} of {case.sizes['draft_vocab']} draft tokens"
                todo = "Fetch the folder again, or correct draft_vocab_size."
                yield finding("error", case.where(case.prefix + name), "no such key", expected, todo)
    key, vocab, num = case.key_of("d2t"), case.sizes["vocab"], case.sizes["draft_vocab"]
    if key is not None and vocab and num and case.files.headers[key].shape == (num,):
        tokens = case.files.array(key).astype(np.int64) + np.arange(num)
        if tokens.min() < 0 or tokens.max() >= vocab or np.unique(tokens).size != num:
            got = f"offsets that lead to {tokens.min()} .. {tokens.max()}"
            expected = f"{num} different tokens of the {vocab}: draft token i is the target's i + d2t[i]"
            yield finding("error", case.where(key), got, expected, "The map is another model's, or holds token ids.")


CHECKS = (
    *COMMON,
    Check("dflash.variant", _check_variant),
    Check("dflash.layers", _check_layers),
    Check("dflash.numbers", _check_numbers),
    Check("dflash.codebooks", _check_codebooks),
    Check("dflash.corrector", check_corrector),
    Check("dflash.path", check_path),
    Check("dflash.tables", _check_tables),
)
_PROBE = "speccompile.speculators.dflash.probe:DflashProbe"
# The keys of both are the same: only a config says that it is in the speculators format.
FORMATS = (
    Format(
        "dflash/speculators",
        "block drafter (speculators format)",
        METHOD,
        _sizes(f"{SCOPE}."),
        _rows(),
        CHECKS,
        config_marks=tuple(("speculators_model_type", kind) for kind in _TYPES),
        ignored=(r"rotary_emb\.inv_freq$", r"^verifier_(lm_head|norm)\.weight$"),
        ours=_canonical_from_speculators,
        config=_config_of_speculators,
        reads=(
            *decoder_reads(f"{SCOPE}."),
            *(f"{SCOPE}.{name}" for name in _OF_LAYERS),
            *(*_OWN, AUX_LAYERS, "sliding_window_non_causal"),
        ),
        derive=_derive,
        probe=_PROBE,
    ),
    Format(
        "dflash/ours",
        "block drafter (DFlash, DFlash 2, DSpark, LiLiCorr, Domino)",
        METHOD,
        _sizes(),
        _rows(),
        CHECKS,
        marks=(r"^hidden_norm\.weight$",),
        without=(r"^midlayer\.", r"^logit_head\.(markov|confidence)_head\."),
        config_marks=(
            *(("architectures", [name]) for name in _NAMES),
            *((key, "domino") for key in ("projector_type", f"{NESTED}.projector_type")),
        ),
        prefixes=("", "model."),
        ours=_canonical_config,
        config=unchanged,
        reads=(*decoder_reads(), *_OF_LAYERS, *_HERE, *(f"{NESTED}.{name}" for name in _HERE)),
        derive=_derive,
        probe=_PROBE,
    ),
)
