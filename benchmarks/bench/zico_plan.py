"""What `bench zico` measures: pairs in which order, which parts; its command line, its file, its table."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

from .zico import TEMPORAL
from .zico_cases import PAPER_NAMES, base_name, zico_case, zico_case_names
from .zico_jobs import PairNames, PairResult, ZicoOptions

FORMAT = 2
FIGURE_8 = (("rhn", "gnmt"), ("nasnet", "gnmt"), ("bert", "gnmt"), ("nasnet", "resnet110"))
FIGURES_7_AND_10 = (("nasnet", "nasnet"), ("resnet110", "resnet110"), ("bert", "bert"))
CHANGING = (("nasnet", "resnet110"), ("nasnet", "nasnet"))
"""Pairs whose budget changes while they run, as in Figure 10; the first pair where neither is there."""
PARTS = ("pairs", "memory", "tracking", "regions", "host_view", "build")
"""The last only compiles, for a run that follows."""
ALL = "all"


@dataclass(frozen=True)
class ZicoPlan:
    """Pairs, most important first, by how much their peaks exceed budgets, and what to look at."""

    pairs: Sequence[PairNames]
    excesses: Sequence[float]
    parts: Sequence[str] = ("pairs", "memory")
    time_limit_s: float | None = None

    @property
    def names(self) -> list[str]:
        """Every case, once."""
        return list(dict.fromkeys(name for pair in self.pairs for name in pair))

    def changes(self, pair: PairNames) -> bool:
        """Whether the pair's budget changes while it runs."""
        wanted = [one for one in self.pairs if tuple(map(base_name, one)) in CHANGING] or self.pairs[:1]
        return pair in wanted


def default_pairs() -> list[PairNames]:
    """Figure 8's four."""
    return list(FIGURE_8)


def all_pairs() -> list[PairNames]:
    """The 21 pairs of the six models, those of the paper's figures first."""
    first = [*FIGURE_8, *FIGURES_7_AND_10]
    seen = {frozenset(pair) for pair in first}
    rest = [pair for pair in combinations_with_replacement(PAPER_NAMES, 2) if frozenset(pair) not in seen]
    equal = [pair for pair in rest if pair[0] == pair[1]]
    return [*first, *equal, *(pair for pair in rest if pair[0] != pair[1])]


def parse_pairs(text: str) -> list[PairNames]:
    """Pairs of cases by name, or all; ``ValueError`` for what is none."""
    if text == ALL:
        return all_pairs()
    found: list[PairNames] = []
    for pair in text.split(","):
        names = [name.strip() for name in pair.split("+")]
        if len(names) != 2:
            raise ValueError(f"expected pairs A+B, with commas; got {pair!r}")
        for name in names:
            try:
                zico_case(name)
            except KeyError:
                known = ", ".join(zico_case_names())
                raise ValueError(f"expected names among {known} and small:NAME; got {name!r}") from None
        found.append((names[0], names[1]))
    return list(dict.fromkeys(found))


def parse_excesses(text: str) -> list[float]:
    """Numbers above 1; ``ValueError`` for what is none."""
    try:
        found = [float(word) for word in text.split(",") if word.strip()]
    except ValueError:
        found = [0.0]
    if not all(number > 1 for number in found):
        raise ValueError(f"expected numbers above 1, with commas; got {text!r}")
    return found


def parse_parts(text: str) -> list[str]:
    """Parts by name; ``ValueError`` for what is none."""
    found = [word.strip() for word in text.split(",") if word.strip()]
    unknown = [part for part in found if part not in PARTS]
    if unknown or not found:
        raise ValueError(f"expected some of {', '.join(PARTS)}; got {text!r}")
    return found


def read_results(path: Path) -> dict[str, Any]:
    """A file that `run_zico` wrote; ``ValueError`` for anything else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"expected results of bench zico in {path}; got: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT or "pairs" not in document:
        raise ValueError(f"expected results of bench zico in format {FORMAT} in {path}; got another document")
    return document


def command_line(plan: ZicoPlan, options: ZicoOptions) -> str:
    words = ["trainmux", "bench", "zico", "--pairs", ",".join("+".join(pair) for pair in plan.pairs)]
    words += ["--excesses", ",".join(f"{excess:g}" for excess in plan.excesses)]
    words += ["--parts", ",".join(plan.parts), "--device", options.device, "--lowering", options.lowering]
    words += ["--precision", options.precision, "--seconds", f"{options.seconds:g}"]
    words += ["--eager" if options.has_eager else "--no-eager"]
    words += ["--machine"] * options.has_machine + ["--processes"] * options.has_processes
    if plan.time_limit_s is not None:
        words += ["--time-limit", f"{plan.time_limit_s:g}"]
    return shlex.join(words)


def table(results: Sequence[PairResult]) -> list[str]:
    """A row per pair, a column per way: solo seconds of work per second, relative to turns as graphs."""
    ways = list(dict.fromkeys(row.way for result in results for row in result.ways))
    lines = ["| pair | " + " | ".join(ways) + " |", "|---" * (len(ways) + 1) + "|"]
    for result in results:
        base = result.work(TEMPORAL) or 1.0
        cells = []
        for way in ways:
            work = result.work(way)
            cells.append("" if work is None else f"{work / base:.2f}")
        lines.append(f"| {'+'.join(result.names)} | " + " | ".join(cells) + " |")
    return lines
