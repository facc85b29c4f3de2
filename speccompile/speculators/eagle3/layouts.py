# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 and P-EAGLE drafters on disk: the first release's layout (canonical), numbered layers, speculators format.

P-EAGLE's files have several layers, and the states of masks: `mask_hidden`, [1, 1, fused] or [1, fused], which passes
through the same norms and `fc`. `d2t` holds offsets: draft token i is the target's i + d2t[i]; `t2d` marks the drafted
ones; both are absent where the vocabularies are one. DeepSpec's have norms of queries and keys in the first layer and
name layers by their outputs (`target_layer_ids`). An LM head of ours may be `lm_head_down.weight` [rank, hidden], then
`lm_head.weight` [draft_vocab, rank], in the canonical layout alone. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from speccompile.checkpoints.target_tables import EMBEDDINGS as _SHARED
from speccompile.doctor.decoder_rows import (
    decoder_config,
    decoder_reads,
    decoder_rows,
    decoder_sizes,
    derive_decoder,
    times,
)
from speccompile.doctor.findings import Finding
from speccompile.doctor.key_checks import COMMON
from speccompile.doctor.layouts import Case, Check, Format, Row, Size, Sizes, finding, flag, lookup, unchanged
from speccompile.speculators.eagle3.speculators_config import (
    SCOPE,
    check_config,
    check_residual,
    check_windows,
    config_from_canonical,
    layer_of,
    masks_from_sizes,
    window_config,
)

EMBEDDINGS = "embed_tokens.weight"
NUM_STREAMS = 3  # residual streams of the target that are fused where the checkpoint does not name them
MASK_HIDDEN = "mask_hidden"
HEAD, HEAD_DOWN = "lm_head.weight", "lm_head_down.weight"
_MASKED = rf"^{MASK_HIDDEN}$"
MASK_TOKENS = ("ptd_token_id", "pard_token", "mask_token_id")  # in the config; the first is written
IDS = ("eagle_aux_hidden_state_layer_ids", "eagle_config.eagle_aux_hidden_state_layer_ids")
OUTPUTS = "target_layer_ids"
STATES = "num_aux_hidden_states"
_OWN = (*IDS, "norm_before_residual", "qk_norm", "sliding_window", "use_sliding_window")


def _derive(sizes: Sizes) -> None:
    derive_decoder(sizes)
    sizes["target_hidden"] = sizes["target_hidden"] or sizes["hidden"]
    width, stored = sizes["target_hidden"], sizes.pop("fc_width")
    is_whole = bool(width and stored and stored % width == 0)
    sizes["num_states"] = int(stored or 0) // int(width or 1) if is_whole else NUM_STREAMS
    sizes["fused"] = times(sizes["num_states"], width)
    sizes["two_hidden"] = times(2, sizes["hidden"])
    sizes["draft_vocab"] = sizes["draft_vocab"] or sizes["vocab"]
    sizes["is_reduced"] = int(sizes["draft_vocab"] != sizes["vocab"])
    sizes["has_own_embedding"] = int(sizes["hidden"] != sizes["target_hidden"])
    may_share = not (sizes["is_reduced"] or sizes["has_own_embedding"] or sizes.get("head_rank"))
    sizes["may_share_head"], sizes["has_own_head"] = int(may_share), int(not may_share and not sizes.get("head_rank"))
    named = sizes.get("mask_token")
    sizes["has_masks"] = int(bool(sizes["has_masks"]) or (named is not None and named >= 0))
    width, flat_width = sizes.pop("mask_width"), sizes.pop("flat_mask_width")
    is_flat = bool(flat_width) and not width
    sizes["has_flat_mask"] = int(bool(sizes["has_masks"]) and is_flat)
    sizes["has_mask"] = int(bool(sizes["has_masks"]) and not is_flat)
    has_first, has_more = sizes.pop("has_first"), sizes.pop("has_more")
    sizes["is_single"] = int(bool(has_first) and not (has_more or sizes["has_masks"]))
    if sizes["is_single"]:  # whatever the config says: some first releases state the target's number
        sizes["num_layers"] = 1


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
        yield finding("error", case.where(key), got, expected, todo)


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
    yield finding("error", case.where(key), got, "the tokens that t2d marks", todo)


def _absolute(case: Case, key: str) -> Finding:
    got, expected = "token ids of the target", "offsets: draft token i is the target's i + d2t[i]"
    todo = "Subtract 0, 1, 2, ... from it, if its author says that it holds ids."
    return finding("error", case.where(key), got, expected, todo)


def _check_layers(case: Case) -> Iterator[Finding]:
    """Yields findings unless the fused states are as many of the target's as `fc` reads."""
    yield from _check_numbers(case)
    ids, outputs, num = layer_ids(case.config), case.config.get(OUTPUTS) or None, case.sizes["num_states"]
    if ids is not None and outputs is not None:
        got, todo = f"{ids!r} and {outputs!r}", "Remove the one that its author did not mean: --set KEY=null."
        yield finding("error", case.where_in_config(IDS[0], OUTPUTS), got, "one of them", todo)
        return
    where, given = case.where_in_config(IDS[0] if outputs is None else OUTPUTS), ids if outputs is None else outputs
    if given is None:
        if num != NUM_STREAMS:
            todo = "Complete config.json, or give it with --set."
            yield finding("error", case.where_in_config(IDS[0]), "nothing", f"{num} layers, as fc reads", todo)
        return
    is_list = isinstance(given, list) and all(type(i) is int for i in given)
    if not is_list or len(given) != num or len(set(given)) != len(given):
        todo = "Correct config.json; other loaders fall back to layers of their own choice."
        yield finding("error", where, repr(given), f"{num} different layers", todo)
        return
    ids = given if outputs is None else [i + 1 for i in given]
    last = case.target.dims.num_layers if case.target else None
    if min(ids) < 0 or (last is not None and max(ids) > last):
        most = "" if last is None else f" to {last}"
        todo = "It was trained for another target: give the model that it belongs to."
        expected = f"layers from 0{most}: the states before them"
        if outputs is not None:
            expected = f"layers from 0{'' if last is None else f' to {last - 1}'}: the states after them"
        yield finding("error", where, repr(given), expected, todo)


def _check_numbers(case: Case) -> Iterator[Finding]:
    stated, num = case.sizes["stated_states"], case.sizes["num_states"]
    if stated and stated != num:
        todo = "Correct config.json, or fetch the folder again."
        yield finding("error", case.where_in_config(STATES), str(stated), f"{num}, as fc reads", todo)
    layers = layer_of(case.config).get("num_hidden_layers")
    if case.sizes["is_single"] and type(layers) is int and layers > 1:
        todo = "Nothing, if it is the target's number, which some first releases state."
        where = case.where_in_config("num_hidden_layers")
        yield finding("warning", where, str(layers), "1, as many as are stored", todo)


def _check_mask(case: Case) -> Iterator[Finding]:
    token, vocab = case.sizes.get("mask_token"), case.sizes.get("vocab")
    if not case.sizes["has_masks"] and case.config.get("speculators_model_type") != "peagle":
        return
    if token is None or token < 0:
        todo = "Give the token that it was trained with, in config.json or --set."
        yield finding("error", case.where_in_config(*MASK_TOKENS), "nothing", "the token of masks", todo)
    elif vocab is not None and token >= vocab:
        todo = "Correct config.json; with another token's row the masks mean nothing to the drafter."
        expected = f"a token below {vocab}, its vocab_size"
        yield finding("error", case.where_in_config(*MASK_TOKENS), str(token), expected, todo)


def mask_token(config: Mapping[str, Any]) -> tuple[bool, Any]:
    """Returns whether a config is that of a P-EAGLE drafter, and the token of its masks; None where it names none."""
    token = next((config[key] for key in MASK_TOKENS if config.get(key) is not None), None)
    is_named = config.get("speculators_model_type") == "peagle" or config.get("parallel_drafting") is True
    return is_named or token is not None, token


def layer_ids(config: Mapping[str, Any]) -> Any:
    """Returns the target's layers as a config states them; None where it does not, or states an empty list."""
    nested = config.get("eagle_config")
    inner = nested.get(IDS[0]) if isinstance(nested, Mapping) else None
    return config.get(IDS[0]) or inner or None


def _canonical_config(case: Case) -> dict[str, Any]:
    config, sizes, layer = case.config, case.sizes, layer_of(case.config)
    stated = {
        IDS[0]: layer_ids(config),
        OUTPUTS: config.get(OUTPUTS),
        "fc_norm": bool(sizes["has_fc_norm"]) or None,
        "norm_output": bool(sizes["norms_output"]) or None,
        "qk_norm": bool(sizes["has_qk_norm"]) or None,
        "head_rank": sizes.get("head_rank") or None,
        "base_model_name_or_path": lookup(config, "speculators_config.verifier.name_or_path"),
    }
    return {
        **decoder_config(layer),
        "model_type": "llama",
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": sizes["num_layers"],
        "vocab_size": sizes["vocab"],
        "draft_vocab_size": sizes["draft_vocab"],
        "target_hidden_size": sizes["target_hidden"],
        "norm_before_residual": bool(config.get("norm_before_residual")),
        "norm_before_fc": bool(sizes["has_input_norm"]),
        "tie_word_embeddings": False,
        **masks_from_sizes(sizes, MASK_TOKENS[0]),
        **window_config(layer),
        **{name: value for name, value in stated.items() if value is not None},
    }


def _complete(config: Mapping[str, Any], tensors: dict[str, Any]) -> None:
    if "d2t" in tensors and "t2d" not in tensors:
        import torch

        tokens = tensors["d2t"].to(torch.int64) + torch.arange(config["draft_vocab_size"])
        tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill_(0, tokens, True)


def _sizes(scope: str = "") -> tuple[Size, ...]:
    """Returns the sizes, with those of the layer in an object of the config."""
    marks, head = ((r"^t2d$", 0), (r"^embed_tokens\.weight$", 0)), ((r"^lm_head\.weight$", 0),)
    return (
        *decoder_sizes(scope),
        Size("num_layers", (f"{scope}num_hidden_layers",), count=r"^layers\.(\d+)\.", default=1),
        Size("vocab", (f"{scope}vocab_size",), stored=marks),
        Size("draft_vocab", ("draft_vocab_size",), stored=head, default=0, needed_with=r"^(d2t|t2d)$"),
        Size("target_hidden", ("target_hidden_size",), default=0, least=0),
        Size("fc_width", stored=((r"^fc\.weight$", 1),), default=0, least=0),
        flag("has_qk_norm", "qk_norm", present=r"\.self_attn\.q_norm\.weight$"),
        Size("stated_states", (STATES,), default=0, least=0),
        flag("has_first", present=r"^midlayer\."),
        flag("has_more", present=r"^layers\.\d+\."),
        flag("has_input_norm", "eagle_config.norm_before_fc", "norm_before_fc", present=r"^input_norm\.weight$"),
        flag("norms_output", "eagle_config.return_hidden_post_norm", "norm_output"),
        flag("has_masks", "parallel_drafting", present=_MASKED),
        Size("mask_token", MASK_TOKENS, default=-1, least=0),
        Size("mask_width", stored=((_MASKED, 2),), default=0, least=0),
        Size("flat_mask_width", stored=((_MASKED, 1),), default=0, least=0),
        flag("has_fc_norm", "fc_norm", present=r"^fc_norm\.\d+\.weight$"),
    )


def _norm_rows(stem: str, over: tuple[tuple[str, str, int], ...], name: str) -> tuple[Row, ...]:
    ends = [f"self_attn.{p}_norm.weight" for p in "qk"]
    return tuple(Row(f"{stem}.{end}", ("head_dim",), over, f"{name}.{end}", need="has_qk_norm") for end in ends)


def _rows(first: str, *, has_low_rank: bool = False) -> tuple[Row, ...]:
    """Returns the rows, with the beginning of the first layer's keys; `has_low_rank`: the LM head may be two."""
    over, further = (("layer", "num_layers", 1),), "layers.{layer}"
    low_rank = (
        Row(HEAD_DOWN, ("head_rank", "hidden"), need="head_rank"),
        Row(HEAD, ("draft_vocab", "head_rank"), need="head_rank"),
    )
    maps = (("d2t", ("draft_vocab",), ("I64", "I32"), False), ("t2d", ("vocab",), ("BOOL",), True))
    return (
        Row("fc.weight", ("hidden", "fused")),
        Row("input_norm.weight", ("fused",), need="has_input_norm"),
        Row("fc_norm.{state}.weight", ("target_hidden",), (("state", "num_states", 0),), need="has_fc_norm"),
        Row(MASK_HIDDEN, (1, 1, "fused"), need="has_mask"),
        Row(MASK_HIDDEN, (1, "fused"), need="has_flat_mask"),
        Row(f"{first}.hidden_norm.weight", ("hidden",), name="midlayer.hidden_norm.weight"),
        *decoder_rows(first, name="midlayer", qkv_input="two_hidden"),
        *decoder_rows(further, over),
        *(row for stem, *own in ((first, (), "midlayer"), (further, over, further)) for row in _norm_rows(stem, *own)),
        Row("norm.weight", ("hidden",)),
        Row(HEAD, ("draft_vocab", "hidden"), need="has_own_head"),
        Row(HEAD, ("draft_vocab", "hidden"), need="may_share_head", is_optional=True),
        *(low_rank if has_low_rank else ()),
        Row(EMBEDDINGS, ("vocab", "hidden"), need="has_own_embedding"),
        Row(EMBEDDINGS, ("vocab", "hidden"), need="!has_own_embedding", is_optional=True, table=_SHARED),
        *(Row(k, d, dtypes=t, need="is_reduced", is_derived=late) for k, d, t, late in maps),
        *(Row(k, d, dtypes=t, need="!is_reduced", is_optional=True) for k, d, t, _ in maps),
    )


_CHECKS = (
    *COMMON,
    Check("eagle3.maps", _check_maps),
    Check("eagle3.layers", _check_layers),
    Check("eagle3.mask", _check_mask),
    Check("eagle3.windows", check_windows),
)
_NUMBERED = r"^layers\.0\.hidden_norm\.weight$"
_IGNORED = (r"rotary_emb\.inv_freq$", r"^verifier_(lm_head|norm)\.weight$")
_PROBE = "speccompile.speculators.eagle3.probe:Eagle3Probe"
_PARTS: dict[str, Any] = {"ignored": _IGNORED, "derive": _derive, "complete": _complete, "probe": _PROBE}
FORMATS = (
    Format(
        "eagle3/ours",
        "EAGLE-3 drafter (first release, SpecForge)",
        "eagle3",
        (*_sizes(), Size("head_rank", ("head_rank",), stored=((r"^lm_head_down\.weight$", 0),), default=0, least=0)),
        _rows("midlayer", has_low_rank=True),
        _CHECKS,
        marks=(r"^midlayer\.",),
        prefixes=("", "model."),
        ours=_canonical_config,
        config=unchanged,
        reads=(*decoder_reads(), *_OWN, OUTPUTS),
        **_PARTS,
    ),
    Format(
        "eagle3/speculators",
        "EAGLE-3 drafter (speculators format)",
        "eagle3",
        _sizes(SCOPE),
        _rows("layers.0"),
        (*_CHECKS, Check("eagle3.config", check_config), Check("eagle3.residual", check_residual)),
        config_marks=(("speculators_model_type", "eagle3"), ("speculators_model_type", "peagle")),
        ours=_canonical_config,
        reads=(*decoder_reads(SCOPE), *_OWN, f"{SCOPE}sliding_window", f"{SCOPE}use_sliding_window"),
        config=config_from_canonical,
        **_PARTS,
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
        ours=_canonical_config,
        config=unchanged,
        reads=(*decoder_reads(), *_OWN, OUTPUTS),
        **_PARTS,
    ),
)
