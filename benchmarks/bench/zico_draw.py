"""Curves, stacked areas and bars as SVG: what the figures of Zico need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .svg import text

WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 72, 16, 46, 44
# Okabe and Ito's, as in the chart of step times.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999", "#f0e442")
OVER_COLOUR = "#b00000"
_BAR_HEIGHT = 15
_GROUP_GAP = 12
_BAR_LEFT = 240


@dataclass(frozen=True)
class Curve:
    """Points from left to right; ``is_stepped`` holds each value until the next point."""

    label: str
    points: Sequence[Sequence[float]]
    is_stepped: bool = False


@dataclass(frozen=True)
class Mark:
    """A line across the chart: at a height, or ``is_vertical`` at a place."""

    label: str
    at: float
    is_vertical: bool = False


@dataclass(frozen=True)
class Bar:
    """``value`` ``None`` is shown as missing; ``is_over`` is drawn in red."""

    label: str
    value: float | None
    note: str = ""
    is_over: bool = False


class _Axes:
    """Values to places, with both axes from 0."""

    def __init__(self, title: str, x_label: str, y_label: str, x_max: float, y_max: float) -> None:
        self.x_max, self.y_max = _round_up(x_max), _round_up(y_max)
        self.parts = [text(LEFT, 18, title, size=13, bold=True)]
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            x, y = self.x(share * self.x_max), self.y(share * self.y_max)
            self.parts += [
                _line(LEFT, y, WIDTH - RIGHT, y, "#dddddd"),
                text(LEFT - 6, y + 4, _short(share * self.y_max), anchor="end"),
                text(x, HEIGHT - BOTTOM + 16, _short(share * self.x_max), anchor="middle"),
            ]
        self.parts += [
            text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_label, anchor="middle"),
            text(6, TOP - 10, y_label),
        ]

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / self.x_max

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value / self.y_max

    def mark(self, mark: Mark) -> None:
        """Draw it dashed, with its label."""
        if mark.is_vertical:
            place = self.x(mark.at)
            self.parts.append(_line(place, TOP, place, HEIGHT - BOTTOM, "#333333", dashed=True))
            self.parts.append(text(place + 3, TOP + 10, mark.label))
        else:
            place = self.y(mark.at)
            self.parts.append(_line(LEFT, place, WIDTH - RIGHT, place, "#333333", dashed=True))
            self.parts.append(text(WIDTH - RIGHT, place - 4, mark.label, anchor="end"))

    def legend(self, labels: Sequence[str]) -> None:
        """A square of each colour and its label, under the title."""
        x = float(LEFT + 150)
        for index, label in enumerate(labels):
            self.parts.append(_box(x, TOP - 20, 11, 11, COLOURS[index % len(COLOURS)]))
            self.parts.append(text(x + 15, TOP - 10, label))
            x += 30 + 6.6 * len(label)


def curves(title: str, x_label: str, y_label: str, rows: Sequence[Curve], marks: Sequence[Mark] = ()) -> str:
    """Curves over one another."""
    points = [point for row in rows for point in row.points]
    across, upright = [m.at for m in marks if m.is_vertical], [m.at for m in marks if not m.is_vertical]
    axes = _Axes(
        title,
        x_label,
        y_label,
        max([point[0] for point in points] + across, default=1.0),
        max([point[1] for point in points] + upright, default=1.0),
    )
    for index, row in enumerate(rows):
        places = _stepped(row.points) if row.is_stepped else row.points
        path = " ".join(f"{axes.x(point[0]):.1f},{axes.y(point[1]):.1f}" for point in places)
        colour = COLOURS[index % len(COLOURS)]
        axes.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    for mark in marks:
        axes.mark(mark)
    axes.legend([row.label for row in rows])
    return _document(axes.parts, HEIGHT)


def stacked(
    title: str,
    x_label: str,
    y_label: str,
    labels: Sequence[str],
    rows: Sequence[Sequence[float]],
    marks: Sequence[Mark] = (),
) -> str:
    """Areas on top of one another; a row is a place and a value of each, which holds until the next row."""
    totals = [sum(row[1:]) for row in rows]
    upright = [mark.at for mark in marks if not mark.is_vertical]
    axes = _Axes(
        title,
        x_label,
        y_label,
        max((row[0] for row in rows), default=1.0),
        max([*totals, *upright], default=1.0),
    )
    for index in reversed(range(len(labels))):
        tops = _stepped([(row[0], sum(row[1 : index + 2])) for row in rows])
        path = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in tops)
        if rows:
            path += f" {axes.x(rows[-1][0]):.1f},{axes.y(0):.1f} {axes.x(rows[0][0]):.1f},{axes.y(0):.1f}"
        axes.parts.append(f'<polygon points="{path}" fill="{COLOURS[index]}"/>')
    for mark in marks:
        axes.mark(mark)
    axes.legend(labels)
    return _document(axes.parts, HEIGHT)


def bars(
    title: str, groups: Sequence[tuple[str, Sequence[Bar]]], *, unit: str = "", mark: Mark | None = None
) -> str:
    """Groups of bars under one another, their values behind them."""
    values = [bar.value for _, group in groups for bar in group if bar.value is not None]
    highest = _round_up(max([*values, *([mark.at] if mark else [])], default=1.0))
    labels = list(dict.fromkeys(bar.label for _, group in groups for bar in group))
    colours = {label: COLOURS[index % len(COLOURS)] for index, label in enumerate(labels)}
    scale = (WIDTH - _BAR_LEFT - 110) / highest
    parts = [text(8, 18, title, size=13, bold=True)]
    y = 34.0
    for name, group in groups:
        parts.append(text(_BAR_LEFT - 10, y + 11, name, anchor="end", bold=True))
        for bar in group:
            base = y + _BAR_HEIGHT - 4
            if bar.value is None:
                parts.append(text(_BAR_LEFT + 3, base, f"{bar.label}: {bar.note or 'not measured'}"))
            else:
                length = max(bar.value * scale, 1.0)
                colour = OVER_COLOUR if bar.is_over else colours[bar.label]
                parts.append(_box(_BAR_LEFT, y, length, _BAR_HEIGHT - 3, colour))
                words = f"{bar.value:.3g}{unit} {bar.label}{' ' if bar.note else ''}{bar.note}"
                parts.append(text(_BAR_LEFT + length + 4, base, words))
            y += _BAR_HEIGHT
        y += _GROUP_GAP
    if mark is not None:
        place = _BAR_LEFT + mark.at * scale
        parts.append(_line(place, 28, place, y, "#333333", dashed=True))
        parts.append(text(place + 3, y + 8, mark.label))
    return _document(parts, y + 16)


def _stepped(points: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Each value held until the place of the next."""
    found: list[tuple[float, float]] = []
    for x, y in points:
        if found:
            found.append((x, found[-1][1]))
        found.append((x, y))
    return found


def _round_up(value: float) -> float:
    """To one or two digits, so that quarters of it read well; 1 for what is not above 0."""
    if value <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(
        step * unit for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 5, 6, 8, 10) if step * unit >= value * 0.9999
    )


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, *, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="5 3"' if dashed else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashes}/>'


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def _document(parts: Sequence[str], height: float) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" '
        f'viewBox="0 0 {WIDTH} {height:g}" font-family="sans-serif" font-size="11">'
    )
    background = f'<rect width="{WIDTH}" height="{height:g}" fill="#ffffff"/>'
    return "\n".join([head, background, *parts, "</svg>"]) + "\n"
