# SPDX-License-Identifier: Apache-2.0
"""Facts of a plan that no API gives without a GPU: its kernels, and the size of its weights.

The layout is not documented: found in plans of TensorRT-RTX 1.7.1. The plan contains the text of each compiled graph.
"""

import re
import struct
from collections import Counter
from pathlib import Path

_SECTION_TABLE, _SECTION, _WEIGHTS = 0x40, struct.Struct("<4s4xQQ"), b"THGW"
_MAIN, _SHAPES, _ANY_ACCELERATOR = b"\nmain {\n", b"\nshape_main {", b"accelerators={*}"
_NO_KERNELS = frozenset({"signal", "wait", "shape_call", "assert"})
_STEP = re.compile(rb"^ {1,2}(?P<kind>[a-z_]+)=\{ name=\"?(?P<name>[^\"\s]+)", re.MULTILINE)


def read_kernels(plan: Path) -> list[Counter[str]]:
    """How often each kernel occurs in each compiled graph; plugins cut a profile into several graphs."""
    texts = [text.partition(b"\0")[0] for text in plan.read_bytes().split(b"header {\n")[1:]]
    return [_count(text) for text in texts if _MAIN in text and _ANY_ACCELERATOR not in text]


def _count(text: bytes) -> Counter[str]:
    steps = _STEP.finditer(text.partition(_MAIN)[2].partition(_SHAPES)[0])
    named = ((step["kind"].decode(), step["name"].decode()) for step in steps)
    # A kernel that the runtime chooses, as for matrix products, has its kind for a name.
    return Counter(
        name if kind in ("function", "runtime_fusion") else kind for kind, name in named if kind not in _NO_KERNELS
    )


def read_weights_bytes(plan: Path) -> int:
    """Bytes of the section of weights."""
    with plan.open("rb") as file:
        head = file.read(_SECTION_TABLE + 16 * _SECTION.size)
    sections = {tag: size for tag, _, size in _SECTION.iter_unpack(head[_SECTION_TABLE:])}
    return sections[_WEIGHTS]
