# SPDX-License-Identifier: Apache-2.0
"""What the CPU at hand cannot do, for tests whose claim depends on it."""

from speccompile.backends.onnxruntime.kernel_build import cpu_features

_DOT_PRODUCTS = {"avx512_vnni", "avx_vnni", "asimddp"}  # of 8-bit integers, by the kernel's names


def least_rows(quantization: str, form: str) -> int:
    """Returns from how many rows on the steps of a form agree in bits: 2 in one case (docs/explanation/lossless.md)."""
    has_vnni = not cpu_features() or bool(cpu_features() & _DOT_PRODUCTS)
    return 2 if (quantization, form) == ("int4", "blocks32") and not has_vnni else 1
