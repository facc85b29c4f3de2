# SPDX-License-Identifier: Apache-2.0
"""What a run is asked for: one prompt or many, with sampling parameters and images for all or for each."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, cast

import numpy as np

from speccompile.core.sampling_params import SamplingParams
from speccompile.errors import RuntimeFault
from speccompile.runtime.images import ImageData

Prompt = str | Sequence[int]
Images = Sequence[ImageData] | Sequence[Sequence[ImageData]]


def match_arguments(
    prompts: Prompt | Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    images: Images | None,
    defaults: SamplingParams,
) -> tuple[Sequence[Prompt], Sequence[SamplingParams], Sequence[Sequence[ImageData]]]:
    """Returns prompts, sampling parameters and images, as many of each; see `SpecEngine.generate`.

    Raises:
        RuntimeFault: their numbers differ, or `sampling` is something else.
    """
    are_many = isinstance(prompts, Sequence | np.ndarray) and not isinstance(prompts, str | bytes)
    are_many = are_many and not (len(prompts) > 0 and isinstance(prompts[0], Integral))
    given = cast("Sequence[Prompt]", prompts if are_many else [prompts])
    is_list = isinstance(sampling, Sequence)
    asked: Sequence[Any] = cast("Sequence[Any]", sampling) if is_list else [sampling or defaults] * len(given)
    if len(asked) != len(given):
        raise RuntimeFault("sampling", f"{len(asked)} entries", f"{len(given)}, as many as prompts", "Match them.")
    for params in asked:
        if not isinstance(params, SamplingParams):
            got, expected = f"a {type(params).__name__}", "SamplingParams, or one for each prompt"
            raise RuntimeFault("sampling", got, expected, "Write SamplingParams(temperature=0.8).")
    rows = cast("Sequence[Sequence[ImageData]]", [()] * len(given))
    if images is not None and len(images):
        rows = cast("Sequence[Sequence[ImageData]]", images if are_many else [images])
    if len(rows) != len(given):
        got, expected = f"{len(rows)} lists", f"{len(given)}, one for each prompt"
        raise RuntimeFault("images", got, expected, "Give an empty list where a prompt has none.")
    return given, asked, rows


def token_ids(index: int, prompt: Any) -> list[int]:
    """Returns the token ids of a prompt that is not a text.

    Raises:
        RuntimeFault: it is not a list of whole numbers.
    """
    try:
        if isinstance(prompt, bytes | Mapping):
            raise TypeError
        return [operator.index(token) for token in prompt]
    except TypeError as fault:
        got, todo = f"a {type(prompt).__name__}", "Give each prompt as a text, or as a list of whole numbers."
        raise RuntimeFault(f"prompt {index}", got, "a text, or token ids", todo) from fault
