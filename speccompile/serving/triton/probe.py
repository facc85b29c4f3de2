# SPDX-License-Identifier: Apache-2.0
"""Is the server's Python stub safe with the numpy that it runs? Some are not, and change tensors in silence."""

from __future__ import annotations

from typing import Any

import numpy as np

from speccompile.errors import RuntimeFault


def check_tensors(pb: Any) -> None:
    """Send an array through the stub's own memory and compare it.

    A stub that was compiled for numpy 1 reads the strides of a numpy 2 dtype at the wrong offset: [1, 2, 3, 4]
    arrives as [1, 1, 1, 1] (Triton 2.51).

    Raises:
        RuntimeFault: the array came back changed.
    """
    sent = np.arange(1, 5, dtype=np.int32)
    read = pb.Tensor.from_dlpack("probe", pb.Tensor("probe", sent).to_dlpack()).as_numpy()
    if not np.array_equal(sent, read):
        raise RuntimeFault(
            f"numpy {np.__version__} in the server's Python stub",
            f"{read.tolist()} where {sent.tolist()} was sent",
            "tensors that arrive as they were sent",
            "This stub was built for numpy 1: install 'numpy<2' in the environment that the model runs in.",
        )
