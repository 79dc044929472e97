"""The results of `bench zico` as the figures ask for them; what is not there is ``None`` or empty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .zico import CHANGES, ROOMY, TEMPORAL, UNLIMITED
from .zico_cases import PAPER_NAMES, base_name
from .zico_jobs import PairNames, PairResult

MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Figure:
    """A figure or table of the paper: its claim, ours, and on what ours was produced.

    ``pictures`` are SVGs by name. Where nothing was measured, ``left_out`` says why, and all else is empty.
    """

    name: str
    title: str
    claim: str
    produced_on: str = ""
    pictures: Mapping[str, str] = field(default_factory=dict)
    table: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = ()
    left_out: str = ""


class Results:
    """A document that `run_zico` wrote."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document
        self.pairs = [PairResult.from_json(pair) for pair in document["pairs"]]
        self.device: str = document["environment"]["device"]
        self.memory: Mapping[str, Mapping[str, Any]] = document["memory"]
        self._simulated = {tuple(row["names"]): row for row in document["simulated"]}

    def memory_of(self, model: str) -> tuple[str, Mapping[str, Any]] | None:
        """The first job of a model whose memory was looked at."""
        return next(((name, row) for name, row in self.memory.items() if base_name(name) == model), None)

    def pair(self, models: PairNames) -> PairResult | None:
        """The first pair of two models that was measured, in this order or the other."""
        return next((pair for pair in self.pairs if _is_of(pair.names, models)), None)

    def simulated(self, models: PairNames) -> Mapping[str, Any] | None:
        """The first pair of two models that was simulated."""
        return next((row for names, row in self._simulated.items() if _is_of(names, models)), None)

    def simulated_pairs(self) -> list[Mapping[str, Any]]:
        return list(self._simulated.values())

    def why_not(self, names: Sequence[str], what: str) -> str:
        """What failed for some jobs, or that it was not asked for."""
        for row in self.document["failed"]:
            if set(map(base_name, row["names"])) == set(names):
                return f"{what} failed: {row['error']}"
        wanted = " and ".join(PAPER_NAMES.get(name, name) for name in dict.fromkeys(names))
        return f"{what} of {wanted} was not measured in this run"

    def kernels_on(self, record: Mapping[str, Any]) -> str:
        """Where a record of memory comes from."""
        scaled = f", scaled to the iteration measured on {self.device}" if record["is_scaled"] else ""
        return f"bytes as traced on {self.device}; kernel times worked out for an H200{scaled}"

    def simulated_on(self, row: Mapping[str, Any]) -> str:
        """Where a simulated run comes from."""
        gain = row["gain"]
        known = "the planner's prior of 1.18" if gain is None else f"the {gain:.2f} that was measured"
        return f"a simulated GPU, with this scheduler; two jobs at once do {known} of the work of turns"


def _is_of(names: Sequence[str], models: Sequence[str]) -> bool:
    return sorted(map(base_name, names)) == sorted(models)


def tight_ways(pair: PairResult) -> list[str]:
    """The budgets that both jobs' peaks exceed, as measured."""
    return [
        row.way
        for row in pair.ways
        if row.way.startswith("co-located") and row.way != ROOMY and row.way not in CHANGES
    ]


def over_temporal(pair: PairResult, way: str) -> float | None:
    """Work done per second over that of turns, both as graphs."""
    base, work = pair.work(TEMPORAL), pair.work(way)
    return None if base is None or work is None else work / base


def kept_gain(pair: PairResult, way: str) -> float | None:
    """The part of the gain with all memory that a way has; ``None`` where there is hardly any."""
    best, own = over_temporal(pair, UNLIMITED), over_temporal(pair, way)
    if best is None or own is None or best < 1.02:
        return None
    return (own - 1) / (best - 1)


def times(value: float | None, digits: int = 2) -> str:
    """A ratio as text, a dash for none."""
    return "–" if value is None else f"{value:.{digits}f}"


def pair_name(names: Sequence[str]) -> str:
    return "+".join(names)
