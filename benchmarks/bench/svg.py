"""A bar chart of speeds, written as SVG: a group per workload, a bar per way, relative to one way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from .record import Record
from .tables import Comparison, compare, is_fused, number, ratio
from .ways.table import WAYS

# Okabe and Ito's colours, which people with colour blindness tell apart; the last are trainmux and variants.
OTHER_COLOURS = ("#999999", "#56b4e9", "#e69f00", "#f0e442", "#cc79a7", "#0072b2")
FUSED_COLOURS = ("#009e73", "#d55e00", "#005c43", "#8c3d00")

CHART_WIDTH = 620
LABEL_WIDTH = 210
VALUE_WIDTH = 70
BAR_HEIGHT = 13
GROUP_GAP = 14
LEGEND_LINE = 18
MARGIN = 12
TITLE_HEIGHT = 44
AXIS_HEIGHT = 34


def chart(records: Sequence[Record]) -> str:
    """Every device's bars under one another; speed relative to the first way that most workloads have."""
    devices = dict.fromkeys(record.row.device for record in records)
    parts: list[str] = []
    top = 0.0
    for device in devices:
        comparison = compare(record for record in records if record.row.device == device)
        drawn, height = _panel(comparison, device, top)
        parts += drawn
        top += height
    width = MARGIN + LABEL_WIDTH + CHART_WIDTH + VALUE_WIDTH + MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top:g}" '
        f'viewBox="0 0 {width} {top:g}" font-family="sans-serif" font-size="11">'
    )
    background = f'<rect width="{width}" height="{top:g}" fill="#ffffff"/>'
    return "\n".join([head, background, *parts, "</svg>"]) + "\n"


def reference_way(comparison: Comparison) -> str | None:
    """The way that the bars are relative to: of those with the most times, the first in the table."""
    counts = {
        way: sum(comparison.median_ms(row, way) is not None for row in comparison.rows)
        for way in comparison.ways
    }
    best = max(counts.values(), default=0)
    return next((way for way, count in counts.items() if best and count == best), None)


def _panel(comparison: Comparison, device: str, top: float) -> tuple[list[str], float]:
    reference = reference_way(comparison)
    if reference is None:
        return [text(MARGIN, top + 20, f"{device}: no times to show")], 32.0
    shown = [row for row in comparison.rows if comparison.median_ms(row, reference) is not None]
    hidden = [row.workload for row in comparison.rows if row not in shown]
    speeds = {
        row: {
            way: ratio(comparison.median_ms(row, reference), comparison.median_ms(row, way))
            for way in comparison.ways
        }
        for row in shown
    }
    colours = _colours(comparison.ways)
    scale = _Scale([speed for group in speeds.values() for speed in group.values() if speed is not None])
    parts = [
        text(MARGIN, top + 20, f"{device}: steps per second, relative to {reference}", size=14, bold=True),
        text(MARGIN, top + 36, "logarithmic scale; longer to the right is faster" + _left_out(hidden)),
    ]
    legend, legend_height = _legend(comparison.ways, colours, top + TITLE_HEIGHT)
    parts += legend
    chart_top = y = top + TITLE_HEIGHT + legend_height + GROUP_GAP
    bars: list[str] = []
    for row, group in speeds.items():
        ways = [way for way in comparison.ways if (row, way) in comparison.records]
        middle = y + BAR_HEIGHT * len(ways) / 2
        bars.append(text(MARGIN + LABEL_WIDTH - 8, middle - 2, row.workload, anchor="end", bold=True))
        sizes = f"batch {row.batch_size}, width {row.width}"
        bars.append(text(MARGIN + LABEL_WIDTH - 8, middle + 11, sizes, anchor="end"))
        for way in ways:
            note = f" = {number(comparison.median_ms(row, way) or 0)} ms" if way == reference else ""
            bars += _bar(group[way], scale, y, colours[way], note)
            y += BAR_HEIGHT
        y += GROUP_GAP
    return [*parts, *_grid_lines(scale, chart_top - 6, y - 6), *bars], y + AXIS_HEIGHT - top


class _Scale:
    """Speeds to places from left to right, doubling by doubling, with 1 always inside."""

    def __init__(self, speeds: Sequence[float]) -> None:
        self.low = min(math.floor(math.log2(min(speeds))), -1)
        self.high = max(math.ceil(math.log2(max(speeds))), 1)

    def x(self, speed: float) -> float:
        share = (math.log2(speed) - self.low) / (self.high - self.low)
        return MARGIN + LABEL_WIDTH + CHART_WIDTH * share


def _bar(speed: float | None, scale: _Scale, y: float, colour: str, note: str) -> list[str]:
    base = y + BAR_HEIGHT - 3
    if speed is None:
        return [text(scale.x(1) + 4, base, "failed", colour="#b00000")]
    left, right = sorted((scale.x(1), scale.x(speed)))
    width = max(right - left, 1.0)
    shape = (
        f'<rect x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BAR_HEIGHT - 2}" fill="{colour}"/>'
    )
    return [shape, text(left + width + 4, base, f"{number(speed)}×{note}")]


def _left_out(workloads: Sequence[str]) -> str:
    names = ", ".join(dict.fromkeys(workloads))
    return f"; without {names}, where that way has no time" if names else ""


def _grid_lines(scale: _Scale, top: float, bottom: float) -> list[str]:
    step = max(1, math.ceil((scale.high - scale.low) / 10))
    lines = []
    for power in range(scale.low, scale.high + 1):
        if power % step and power != 0:
            continue
        x = scale.x(2.0**power)
        colour = "#333333" if power == 0 else "#dddddd"
        lines.append(f'<line x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}" stroke="{colour}"/>')
        label = f"{2**power}×" if power >= 0 else f"1/{2**-power}×"
        lines.append(text(x, bottom + 14, label, anchor="middle"))
    return lines


def _legend(ways: Sequence[str], colours: dict[str, str], top: float) -> tuple[list[str], float]:
    parts: list[str] = []
    x, y = float(MARGIN), top
    for way in ways:
        width = 26 + 6.6 * len(way)
        if x + width > MARGIN + LABEL_WIDTH + CHART_WIDTH:
            x, y = float(MARGIN), y + LEGEND_LINE
        parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="11" height="11" fill="{colours[way]}"/>')
        parts.append(text(x + 15, y + 10, way))
        x += width
    return parts, y - top + LEGEND_LINE


def _colours(ways: Sequence[str]) -> dict[str, str]:
    """A way's colour goes by its place in the table of ways, so that it is the same in every chart."""
    fused = [way for way in ways if is_fused(way)]
    others = [way for way in WAYS if not is_fused(way)]
    return {
        **{way: OTHER_COLOURS[index % len(OTHER_COLOURS)] for index, way in enumerate(others)},
        **{way: FUSED_COLOURS[index % len(FUSED_COLOURS)] for index, way in enumerate(fused)},
    }


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 11,
    anchor: str = "start",
    bold: bool = False,
    colour: str = "#222222",
) -> str:
    """A line of text whose ``anchor`` lies at ``x``, ``y``."""
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{weight}>'
        f"{escape(words)}</text>"
    )
