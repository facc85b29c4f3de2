# SPDX-License-Identifier: Apache-2.0
"""The figures of a benchmark as a picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speccompile.errors import RuntimeFault

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".svg", ".png")
_WIDTH_IN, _ROW_IN, _FRAME_IN = 7.0, 0.28, 1.0  # of the picture, a bar, and what stands around the bars


def check_plot(file: Path | None) -> None:
    """Refuses a picture that could not be written. Raises RuntimeFault: wrong kind or folder, or no matplotlib."""
    if file is None:
        return
    if file.suffix.lower() not in SUFFIXES:
        raise RuntimeFault("--plot", str(file), f"a name that ends in {' or '.join(SUFFIXES)}", "Rename the file.")
    if not file.parent.is_dir():
        raise RuntimeFault("--plot", f"no folder {file.parent}", "a folder to write into", "Make it first.")
    if importlib.util.find_spec("matplotlib") is None:
        todo = "Install it: pip install matplotlib, which is all of the extra [bench]. Or leave --plot out."
        raise RuntimeFault("--plot", "no package matplotlib", "matplotlib", todo)


def draw_report(report: Mapping[str, Any], file: Path) -> None:
    """Draws tokens/s with their spread, a bar a mode: over all prompts, and for each category and each context."""
    import matplotlib as mpl

    mpl.use("svg" if file.suffix.lower() == ".svg" else "agg")
    mpl.rcParams.update({"svg.hashsalt": "speccompile", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot as plt

    groups = {"all prompts": report["modes"]}
    for kind, title in (("by_category", "{}"), ("by_context", "{} tokens of context")):
        if len(found := report.get(kind, {})) > 1:
            groups |= {title.format(name): group["modes"] for name, group in found.items()}
    sizes = [len(modes) * _ROW_IN + _FRAME_IN for modes in groups.values()]
    figure, panels = plt.subplots(
        len(groups), 1, figsize=(_WIDTH_IN, sum(sizes)), squeeze=False, gridspec_kw={"height_ratios": sizes}
    )
    for panel, (title, modes) in zip(panels[:, 0], groups.items(), strict=True):
        _draw_modes(panel, title, modes)
    environment = report["environment"]
    figure.suptitle(f"{environment['cpu']}, {environment['threads']} threads", fontsize=9)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None} if file.suffix.lower() == ".svg" else None)
    plt.close(figure)


def _draw_modes(panel: Axes, title: str, modes: Mapping[str, Any]) -> None:
    names = list(modes)[::-1]  # the first one on top
    speeds = [modes[name]["tokens_per_s"] for name in names]
    spreads = [modes[name]["tokens_per_s_spread"] or 0.0 for name in names]
    colours = ["0.6" if name.rpartition(" ")[2] in ("plain", "transformers") else "C0" for name in names]
    panel.barh(names, speeds, xerr=spreads, color=colours, height=0.7)
    panel.set_title(title, loc="left", fontsize=9)
    panel.set_xlabel("decode tokens/s")
    panel.set_xlim(left=0)
    panel.spines[["top", "right"]].set_visible(False)
