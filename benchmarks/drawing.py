"""Figures of a paper as SVG files that stay the same byte for byte while their data do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import matplotlib
from matplotlib import rcsetup
from matplotlib.figure import Figure

T = TypeVar("T")

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
"""Okabe and Ito's, which colour-blind readers can tell apart."""


def draw_all(
    figures: Mapping[str, Callable[[T], Figure | None]], data: T, folder: Path, salt: str
) -> dict[str, Path]:
    """Draw every figure that there is data for; the files by name. ``salt`` decides about names in them."""
    style = {
        "svg.hashsalt": salt,
        "svg.fonttype": "none",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": rcsetup.cycler("color", COLOURS),
    }
    written = {}
    with matplotlib.rc_context(style):
        for name, make in figures.items():
            figure = make(data)
            if figure is not None:
                folder.mkdir(parents=True, exist_ok=True)
                written[name] = folder / f"{name}.svg"
                figure.savefig(written[name], metadata={"Date": None}, bbox_inches="tight", dpi=150)
    return written
