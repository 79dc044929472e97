"""Records → tables of text: times, speed-ups, memory. Pure; the same tables go to terminal and page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from .record import Record, Row
from .ways.table import FUSED, VARIANT_SEPARATOR, WAYS

MISSING = "–"


@dataclass(frozen=True)
class Grid:
    """A table: a heading per column, cells as text; the first column names the row."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Comparison:
    """Records of one device by row and way; rows in the order measured, ways in the order of the table."""

    rows: tuple[Row, ...]
    ways: tuple[str, ...]
    records: dict[tuple[Row, str], Record]

    def median_ms(self, row: Row, way: str) -> float | None:
        record = self.records.get((row, way))
        return None if record is None else record.median_ms

    @property
    def subjects(self) -> tuple[str, ...]:
        """trainmux and those of its variants that have times: what the other ways are compared with."""
        return tuple(
            way
            for way in self.ways
            if is_fused(way) and any(self.median_ms(row, way) is not None for row in self.rows)
        )

    @property
    def others(self) -> tuple[str, ...]:
        return tuple(way for way in self.ways if not is_fused(way))


def is_fused(way: str) -> bool:
    return way.partition(VARIANT_SEPARATOR)[0] == FUSED


def compare(records: Iterable[Record]) -> Comparison:
    """Arrange records, which are of one device and no two of the same row and way."""
    found = {(record.row, record.way): record for record in records}
    order = list(WAYS)
    ways = dict.fromkeys(way for _, way in found)
    return Comparison(
        rows=tuple(dict.fromkeys(row for row, _ in found)),
        ways=tuple(sorted(ways, key=lambda way: order.index(way.partition(VARIANT_SEPARATOR)[0]))),
        records=found,
    )


def row_name(row: Row) -> str:
    return f"{row.workload} (batch {row.batch_size}, width {row.width})"


def times(comparison: Comparison) -> Grid:
    """Milliseconds per member and step: median, and smallest to largest block."""

    def cell(record: Record) -> str:
        if record.measurement is None:
            return "failed"
        timing = record.measurement.timing
        return f"{number(timing.median_ms)} ({number(timing.min_ms)}–{number(timing.max_ms)})"

    return _by_way(
        "Milliseconds per member and step: median of the blocks (smallest–largest)", comparison, cell
    )


def build_times(comparison: Comparison) -> Grid:
    """Seconds from finished models to the end of the first step, and the same from the start."""

    def cell(record: Record) -> str:
        if record.measurement is None:
            return MISSING
        timing = record.measurement.timing
        return f"{number(timing.build_s)} ({number(timing.start_to_first_step_s)})"

    title = "Seconds to the end of the first step: from finished models (from the start, without imports)"
    return _by_way(title, comparison, cell)


def peak_memory(comparison: Comparison) -> Grid:
    """GiB that the allocator reserved at most, and what the device as a whole had less."""

    def cell(record: Record) -> str:
        memory = None if record.measurement is None else record.measurement.memory
        if memory is None:
            return MISSING
        return f"{number(memory.max_reserved_bytes / 2**30)} ({number(memory.device_delta_bytes / 2**30)})"

    return _by_way("Peak memory in GiB: reserved by torch (taken from the device)", comparison, cell)


def speedups(comparison: Comparison, subject: str) -> Grid:
    """Time of every other way over that of ``subject``, and at the bottom the geometric means by width."""
    ratios = {
        other: {
            row: ratio(comparison.median_ms(row, other), comparison.median_ms(row, subject))
            for row in comparison.rows
        }
        for other in comparison.others
    }
    body = [
        (row_name(row), *(_times_faster(ratios[other][row]) for other in comparison.others))
        for row in comparison.rows
    ]
    widths = list(dict.fromkeys(row.width for row in comparison.rows))
    bottom = []
    for width in widths:
        rows = [row for row in comparison.rows if row.width == width]
        means = [mean_ratio(ratios[other][row] for row in rows) for other in comparison.others]
        name = f"geometric mean, width {width} (of how many)"
        bottom.append((name, *(_mean_text(*mean) for mean in means)))
    title = f"How many times faster {subject} is than each"
    return Grid(title, ("workload", *comparison.others), (*body, *bottom))


def times_and_speedups(comparison: Comparison) -> list[Grid]:
    """Times, and a table of speed-ups for trainmux and each variant of it."""
    grids = [times(comparison)]
    if comparison.others:
        grids += [speedups(comparison, subject) for subject in comparison.subjects]
    return grids


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    if numerator is None or denominator is None:
        return None
    return numerator / denominator


def mean_ratio(ratios: Iterable[float | None]) -> tuple[float | None, int]:
    """Geometric mean of those that are there, and how many they are."""
    present = [value for value in ratios if value is not None]
    return (geometric_mean(present) if present else None), len(present)


def number(value: float) -> str:
    """Three digits that count, without an exponent."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _by_way(title: str, comparison: Comparison, cell: Callable[[Record], str]) -> Grid:
    def text(row: Row, way: str) -> str:
        record = comparison.records.get((row, way))
        return MISSING if record is None else cell(record)

    rows = tuple((row_name(row), *(text(row, way) for way in comparison.ways)) for row in comparison.rows)
    return Grid(title, ("workload", *comparison.ways), rows)


def _times_faster(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}×"


def _mean_text(mean: float | None, count: int) -> str:
    return MISSING if mean is None else f"{mean:.2f}× ({count})"


def failures(records: Sequence[Record]) -> list[str]:
    """One line per record that has no measurement, with the reason."""
    return [
        f"{row_name(record.row)}, {record.way}: failed: {record.error}{_beside(record)}"
        for record in records
        if record.measurement is None
    ]


def _beside(record: Record) -> str:
    """How many others were built at the same time: a limit of time means less where cores are shared."""
    num_builds = record.settings.get("builds_at_once", 1)
    return f", up to {num_builds} builds at once" if num_builds > 1 else ""
