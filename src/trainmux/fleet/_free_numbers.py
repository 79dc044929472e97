"""Numbers of the members' code that are inputs of a group's graphs, because members differ in them."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainmux.fleet._traces import Trace
from trainmux.ir import FreeNumber
from trainmux.tracing import TracedGraph, number_locations, structure_of, with_inputs

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class GroupTrace:
    """The graph that the members of a group run, with inputs for the numbers in which they differ."""

    graph: TracedGraph
    key: str


class FreeNumbers:
    """Columns of numbers, each with a value for every slot, as far as it is known.

    Positions of a graph that have one value per member in common share a column. A number that was free once
    stays free: it may change, and members may come, without another program.
    """

    def __init__(self, width: int) -> None:
        self.values: Doubles = np.ones((0, width))
        self._known = np.zeros((0, width), np.bool_)
        self._columns: dict[tuple[Hashable, str], dict[int, int]] = {}
        self._fixed: dict[tuple[Hashable, str], Doubles] = {}
        self._made: dict[Hashable, GroupTrace] = {}

    def merged(self, purpose: Hashable, rows: Sequence[int], traces: Sequence[Trace]) -> GroupTrace:
        """The graph for members in ``rows``, whose ``traces`` have one structure, and their values."""
        place = (purpose, traces[0].key)
        numbers = np.array([trace.numbers for trace in traces], np.float64)
        bits = numbers.view(np.int64)
        known, used = self._columns.get(place, {}), {}
        for position in sorted({*known, *np.flatnonzero((bits != bits[0]).any(0)).tolist()}):
            values = numbers[:, position].copy()
            column = known.get(position)
            if column is None or not self._fits(column, rows, values):
                column = self._column_for(rows, values)
            self.values[column, rows], self._known[column, rows] = values, True
            used[position] = column
        self._columns[place], self._fixed[place] = used, numbers[0]
        return self._graph(traces[0], used)

    def accepts(self, purpose: Hashable, trace: Trace) -> bool:
        """Whether a newcomer's numbers fit the graph as it is."""
        place = (purpose, trace.key)
        if place not in self._fixed:
            return False
        used, fixed, numbers = self._columns[place], self._fixed[place], np.array(trace.numbers, np.float64)
        is_same = numbers.view(np.int64) == fixed.view(np.int64)
        given: dict[int, float] = {}
        free_ones_agree = all(
            given.setdefault(column, numbers[position]) == numbers[position]
            for position, column in used.items()
        )
        return free_ones_agree and all(is_same[i] or i in used for i in range(len(numbers)))

    def taken(self, sources: Sequence[tuple[FreeNumbers, int]]) -> FreeNumbers:
        """Make columns like these for rows of this and of others like it."""
        other = FreeNumbers(len(sources))
        other._add_columns(len(self.values))
        for new, (numbers, row) in enumerate(sources):
            num = min(len(numbers.values), len(self.values))
            other.values[:num, new] = numbers.values[:num, row]
            other._known[:num, new] = numbers._known[:num, row]
        other._columns, other._fixed, other._made = dict(self._columns), dict(self._fixed), self._made
        return other

    def resized(self, rows: Sequence[int], width: int) -> None:
        """Keep the values of ``rows``, moved together, among ``width``."""
        kept = self.values[:, list(rows)], self._known[:, list(rows)]
        self.values, self._known = np.ones((0, width)), np.zeros((0, width), np.bool_)
        self._add_columns(len(kept[0]))
        self.values[:, : len(rows)], self._known[:, : len(rows)] = kept

    def forget(self, row: int) -> None:
        """Forget the values of a slot that another member comes into."""
        self._known[:, row] = False

    def described(self, purpose: Hashable, trace: Trace, rows: Sequence[int]) -> tuple[FreeNumber, ...]:
        """Each column of a graph with where it is read."""
        positions: dict[int, list[int]] = {}
        for position, column in self._columns.get((purpose, trace.key), {}).items():
            positions.setdefault(column, []).append(position)
        return tuple(
            FreeNumber(
                tuple(dict.fromkeys(number_locations(trace.graph, read))),
                tuple(self.values[column, list(rows)].tolist()),
            )
            for column, read in positions.items()
        )

    def _fits(self, column: int, rows: Sequence[int], values: Doubles) -> bool:
        present, known = self.values[column, list(rows)], self._known[column, list(rows)]
        return bool((~known | (present.view(np.int64) == values.view(np.int64))).all())

    def _column_for(self, rows: Sequence[int], values: Doubles) -> int:
        for column in range(len(self.values)):
            if self._fits(column, rows, values):
                return column
        self._add_columns(1)
        return len(self.values) - 1

    def _add_columns(self, num: int) -> None:
        width = self.values.shape[1]
        self.values = np.vstack([self.values, np.ones((num, width))])
        self._known = np.vstack([self._known, np.zeros((num, width), np.bool_)])

    def _graph(self, trace: Trace, columns: Mapping[int, int]) -> GroupTrace:
        numbers = np.array([0.0 if i in columns else number for i, number in enumerate(trace.numbers)])
        decisive = (trace.key, tuple(columns.items()), numbers.tobytes())
        if decisive not in self._made:
            graph = trace.graph
            if columns or structure_of(graph).numbers != trace.numbers:
                graph = with_inputs(graph, trace.numbers, columns)
            key = hashlib.sha256(repr(decisive).encode()).hexdigest()
            self._made[decisive] = GroupTrace(graph, key)
        return self._made[decisive]
