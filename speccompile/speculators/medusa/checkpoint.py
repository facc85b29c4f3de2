# SPDX-License-Identifier: Apache-2.0
"""Medusa heads on disk, and as the source of a graph. Needs no torch before the export.

Layouts: the first release's (canonical), inside a base model's files, ModelOpt's and vLLM's. Head i has `num_layers`
blocks x + SiLU(W x + b) and an LM head. Old releases repeat one block: copies may be stored or left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from speccompile.checkpoints.target_tables import LM_HEAD, read_tables
from speccompile.core.jobs import GraphJob, SourceContext
from speccompile.core.specs import GraphSpec
from speccompile.doctor.findings import Finding
from speccompile.doctor.key_checks import COMMON
from speccompile.doctor.layouts import Case, Check, Format, Row, Size, Sizes, Target, config_of_sizes, finding, flag
from speccompile.doctor.token_map import CHECK_MAP, IGNORED_MAP, MAP_ROW, cut_heads, derive_map, map_sizes
from speccompile.errors import RecipeError
from speccompile.export.checks import check_head_candidates
from speccompile.export.speculator_source import SpeculatorSource
from speccompile.speculators.medusa.config import HeadsSizes

if TYPE_CHECKING:
    import torch

    from speccompile.speculators.medusa.config import HeadsOptions

_OVER_HEADS = (("head", "num_heads", 0),)
_LATER = (*_OVER_HEADS, ("layer", "num_layers", 1))
_TARGET_HEAD = "lm_head.weight"  # the target's, in which all heads end
_OF_TARGET = "target.lm_head.weight"  # its copy in the graph
_NAMES = "{head}.{layer}.linear."  # of a block in the canonical layout


def _derive(sizes: Sizes) -> None:
    sizes["target_hidden"] = sizes["hidden"]
    derive_map(sizes)


def _check_copies(case: Case) -> Iterator[Finding]:
    num_layers = case.sizes.get("num_layers") or 1
    later = [e for e in case.expected.values() if e.row.may_differ and e.name.endswith(".weight")]
    gone = [e for e in later if e.key not in case.files.headers]
    if gone:
        got = f"no {gone[0].key} ({len(gone)} missing)"
        todo = "Nothing, if the heads were trained by the first release, which repeats the first block."
        yield finding("warning", case.where(), got, f"{num_layers} blocks a head; the first stands in", todo)
    elif later and case.reads_values and all(_is_copy(case, e.key, e.fallback) for e in later):
        got, expected = f"{num_layers} blocks a head with the same weights", "blocks of their own"
        todo = "Nothing, if the heads were trained by the first release, which repeats the first block."
        yield finding("warning", case.where(later[0].key), got, expected, todo)


def _is_copy(case: Case, key: str, name: str) -> bool:
    first = case.key_of(name)
    return first is not None and case.files.array(key).tobytes() == case.files.array(first).tobytes()


def _canonical_config(case: Case) -> dict[str, Any]:
    config = case.config
    name = config.get("base_model_name_or_path") or config.get("_name_or_path") or ""
    sizes = config_of_sizes(_V1_SIZES, case.sizes)
    return {"model_type": "medusa", **sizes, "base_model_name_or_path": name}


def _config(config: Mapping[str, Any], target: Target | None) -> dict[str, Any]:
    return {**config, "base_model_name_or_path": target.name if target else config.get("base_model_name_or_path", "")}


def _vllm_config(config: Mapping[str, Any], target: Target | None) -> dict[str, Any]:
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "num_heads": config["medusa_num_heads"],
        "num_hidden_layers": config["medusa_num_layers"],
        "hidden_size": config["hidden_size"],
        "vocab_size": config["vocab_size"],
        "medusa_fc_bias": True,
        "original_lm_head": bool(config.get("original_lm_head", False)),
        "truncated_vocab_size": config.get("truncated_vocab_size"),
        "base_model_name_or_path": _config(config, target)["base_model_name_or_path"],
    }


def _sizes(head: str, block: str, lm_head: str, num_layers: Size) -> tuple[Size, ...]:
    return (
        Size("num_heads", ("medusa_num_heads", "num_heads"), count=head),
        num_layers,
        Size("hidden", ("hidden_size",), stored=((block, 1), (lm_head, 1))),
        Size("vocab", ("vocab_size",), stored=((lm_head, 0),)),
        flag("uses_target_head", "original_lm_head"),
        *map_sizes(lm_head, "truncated_vocab_size"),
    )


def _rows(block: str, lm_head: str) -> tuple[Row, ...]:
    parts: tuple[tuple[str, tuple[str, ...], bool], ...] = (
        ("weight", ("hidden", "hidden"), False),
        ("bias", ("hidden",), True),
    )
    first, canonical = block.replace("{layer}", "0"), _NAMES.replace("{layer}", "0")
    return (
        *(Row(first + tail, dims, _OVER_HEADS, canonical + tail, is_zero=zero) for tail, dims, zero in parts),
        *(
            Row(block + tail, dims, _LATER, _NAMES + tail, fallback=canonical + tail, may_differ=True)
            for tail, dims, _ in parts
        ),
        Row(lm_head, ("draft_vocab", "hidden"), _OVER_HEADS, "{head}.{num_layers}.weight", need="!uses_target_head"),
        Row(_TARGET_HEAD, ("draft_vocab", "hidden"), need="uses_target_head", is_optional=True, table=LM_HEAD),
        MAP_ROW,
    )


_HEAD, _BLOCK, _LM_HEAD = r"^(\d+)\.\d+\.", r"^\d+\.\d+\.linear\.weight$", r"^\d+\.\d+\.weight$"
# An LM head is numbered after its blocks, whether their copies are stored or not.
_V1_SIZES = _sizes(
    _HEAD,
    _BLOCK,
    _LM_HEAD,
    Size("num_layers", ("medusa_num_layers",), count=r"^\d+\.(\d+)\.weight$", count_first=1, default=1),
)
_V1_ROWS = _rows(_NAMES, "{head}.{num_layers}.weight")
_PROBE = "speccompile.speculators.medusa.probe:MedusaProbe"
_CHECKS = (*COMMON, Check("medusa.copies", _check_copies), CHECK_MAP)


def _v1(name: str, label: str, prefixes: tuple[str, ...], *, has_others: bool) -> Format:
    """Returns the first release's keys with a prefix."""
    return Format(
        f"medusa/{name}",
        label,
        "medusa",
        _V1_SIZES,
        _V1_ROWS,
        _CHECKS,
        marks=(_BLOCK, _LM_HEAD),
        prefixes=prefixes,
        has_others=has_others,
        derive=_derive,
        ours=_canonical_config,
        config=_config,
        probe=_PROBE,
    )


_VLLM_BLOCK, _VLLM_HEAD = r"^blocks\.\d+\.layers\.\d+\.weight$", r"^lm_heads\.\d+\.weight$"
FORMATS = (
    _v1("ours", "Medusa heads (first release)", ("",), has_others=False),
    _v1("hf", "Medusa heads inside a base model's files", ("medusa_head.", "model.medusa_head."), has_others=True),
    _v1("modelopt", "Medusa heads (ModelOpt)", ("medusa_heads.",), has_others=True),
    Format(
        "medusa/vllm",
        "Medusa heads (vLLM)",
        "medusa",
        _sizes(
            r"^blocks\.(\d+)\.",
            _VLLM_BLOCK,
            _VLLM_HEAD,
            Size(
                "num_layers",
                ("num_hidden_layers", "medusa_num_layers"),
                count=r"^blocks\.\d+\.layers\.(\d+)\.weight$",
                default=1,
            ),
        ),
        (
            *_rows("blocks.{head}.layers.{layer}.", "lm_heads.{head}.weight"),
            # vLLM needs the target's head beside them, under either name.
            Row(
                "lm_heads.0.weight",
                ("draft_vocab", "hidden"),
                name=_TARGET_HEAD,
                need="uses_target_head",
                fallback=_TARGET_HEAD,
                table=LM_HEAD,
            ),
        ),
        _CHECKS,
        marks=(_VLLM_BLOCK, _VLLM_HEAD),
        config_marks=(("architectures", ["MedusaModel"]),),
        prefixes=("", "medusa_heads."),
        derive=_derive,
        ignored=(IGNORED_MAP,),
        ours=_canonical_config,
        config=_vllm_config,
        complete=cut_heads,
        probe=_PROBE,
    ),
)


def sizes_of(case: Case) -> HeadsSizes:
    """Returns the sizes of a checkpoint."""
    uses_target_head = bool(case.sizes["uses_target_head"])
    hidden, vocab = case.size("hidden"), case.size("vocab")
    num = case.sizes.get("num_mapped") or vocab
    return HeadsSizes(hidden, vocab, case.size("num_heads"), case.size("num_layers"), uses_target_head, num)


class HeadsSource(SpeculatorSource):
    """A `GraphSource` for a target of the sizes that the heads were made for; the job has `HeadsOptions`."""

    role = "heads"
    formats = FORMATS
    output_check = staticmethod(check_head_candidates)

    def __init__(self, job: GraphJob, context: SourceContext) -> None:
        super().__init__(job, context)
        options: HeadsOptions = job.options
        target: Sizes = {"hidden": self.target.hidden_size, "vocab": self.target.vocab_size}
        known = {name: size for name, size in self.case.sizes.items() if size is not None}
        # Old configs leave out what is the target's.
        sizes = sizes_of(replace(self.case, sizes={**target, **known}))
        num_candidates = min(options.num_candidates, sizes.draft_vocab_size)
        self.dims: HeadsSizes = replace(
            sizes, num_drafts=options.num_heads or sizes.num_heads, num_candidates=num_candidates
        )
        self.needs_tables = self.dims.uses_target_lm_head and self.case.key_of(_TARGET_HEAD) is None
        if options.num_heads is not None:  # published configs state a wrong number; the recipe overrides it
            self.overrides = {"medusa_num_heads": self.dims.num_heads}
        self._check_sizes(options.least_heads)

    def _check_sizes(self, least_heads: int) -> None:
        sizes, model = self.dims, self.job.model
        self.check_target("a hidden size of {}", sizes.hidden_size, made="the heads that were trained")
        if sizes.num_drafts > sizes.num_heads:
            expected = f"at most {sizes.num_heads}, the heads of {model}"
            raise RecipeError("speculator.num_heads", str(sizes.num_drafts), expected, "Lower it.")
        if least_heads > sizes.num_drafts:
            expected = f"a depth of at most {sizes.num_drafts}, the heads of {model}"
            raise RecipeError("speculator.tree", f"a depth of {least_heads}", expected, "Leave the deeper nodes out.")

    def spec(self) -> GraphSpec:
        return self.dims.spec(self.job.name)

    def part_of(self, name: str) -> str:
        head = name.partition(".")[0]
        return "linear" if name == _OF_TARGET or (head.isdigit() and int(head) < self.dims.num_drafts) else ""

    def tables(self) -> dict[str, tuple[int, ...]]:
        shape = (self.dims.draft_vocab_size, self.dims.hidden_size)
        return {_OF_TARGET: shape} if self.dims.uses_target_lm_head else {}

    def make_module(self) -> torch.nn.Module:
        from speccompile.export.draft_vocab import target_tokens
        from speccompile.speculators.medusa.model import MedusaDrafter, make_heads

        dims, weights = self.dims, self.read_weights()
        tokens = target_tokens(dims.draft_vocab_size, dims.vocab_size, weights)
        lm_head = (weights or {}).get(_TARGET_HEAD)
        if self.needs_tables:
            whole = read_tables(self.context).lm_head
            lm_head = whole if tokens is None else whole[tokens]
        return MedusaDrafter(make_heads(dims, weights), dims.num_candidates, lm_head, tokens)
