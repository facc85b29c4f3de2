# SPDX-License-Identifier: Apache-2.0
"""Draft models that read masks (PARD), as the doctor sees them: language models whose config names a mask token."""

from __future__ import annotations

from collections.abc import Iterator

from speccompile.checkpoints.checkpoint import check_checkpoint, read_dims
from speccompile.doctor.findings import Finding
from speccompile.doctor.layouts import ANY, Case, Check, Format, Size, finding
from speccompile.errors import CheckpointError
from speccompile.export.decoder_source import MASK_TOKEN


def _check_model(case: Case) -> Iterator[Finding]:
    try:
        check_checkpoint(case.folder, read_dims(case.folder))
    except CheckpointError as fault:
        yield finding("error", fault.where, fault.got, fault.expected, fault.todo)


def _check_token(case: Case) -> Iterator[Finding]:
    token, num = case.config.get(MASK_TOKEN), case.sizes.get("vocab")
    if type(token) is not int or token < 0 or (num is not None and token >= num):
        todo = "Correct config.json; with another token's row the masks mean nothing to the draft."
        yield finding(
            "error", case.where_in_config(MASK_TOKEN), repr(token), f"a token below {num}, its vocab_size", todo
        )


FORMATS = (
    Format(
        "draft_model/pard",
        "draft model that reads masks (PARD)",
        "draft_model",
        (Size("vocab", ("vocab_size",)),),
        (),
        (Check("pard.model", _check_model), Check("pard.token", _check_token)),
        without=(r"(^|\.)mask_hidden$",),  # of P-EAGLE, whose config may name a mask token by the same key
        config_marks=((MASK_TOKEN, ANY),),
        is_model=True,
    ),
)
