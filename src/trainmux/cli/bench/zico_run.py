"""``trainmux bench zico``: pairs by name, their results as a table and as a file."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .environment import describe
from .zico import PairResult, ZicoOptions, run_pairs
from .zico_cases import zico_case, zico_case_names

FORMAT = 1
DEFAULT_PAIRS = "bert+gnmt,resnet50+gnmt,resnet110+bert,resnet50+bert"

UNLIMITED = "two streams, unlimited"
ROOMY = "co-located, all memory"


def parse_pairs(text: str) -> list[tuple[str, str]]:
    """Pairs of cases by name; ``ValueError`` for what is none."""
    found = []
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
    return found


def parse_excesses(text: str) -> list[float]:
    """Numbers above 1; ``ValueError`` for what is none."""
    try:
        found = [float(word) for word in text.split(",") if word.strip()]
    except ValueError:
        found = [0.0]
    if not all(number > 1 for number in found):
        raise ValueError(f"expected numbers above 1, with commas; got {text!r}")
    return found


def run_zico(
    pairs: Sequence[tuple[str, str]],
    excesses: Sequence[float],
    *,
    device: str,
    lowering: str,
    precision: str,
    seconds: float,
    has_eager: bool,
    out: Path,
    tell: Callable[[str], object],
) -> list[PairResult]:
    """Measure every pair; what is there is written after each of them."""
    options = ZicoOptions(device, lowering, precision, seconds, has_eager)
    words = ["trainmux", "bench", "zico", "--pairs", ",".join("+".join(pair) for pair in pairs)]
    words += ["--excesses", ",".join(map(str, excesses)), "--device", device, "--lowering", lowering]
    words += ["--precision", precision, "--seconds", str(seconds), "--eager" if has_eager else "--no-eager"]
    document: dict[str, Any] = {
        "format": FORMAT,
        "command": shlex.join(words),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": describe(device),
        "cases": {name: zico_case(name).note for pair in pairs for name in pair},
        "pairs": [],
        "failed": [],
    }
    found: dict[tuple[str, str], PairResult] = {}
    for result in run_pairs(pairs, options, excesses, tell):
        if isinstance(result, PairResult):
            found[result.names] = result
        else:
            names, error = result
            document["failed"].append({"names": names, "error": f"{type(error).__name__}: {error}"})
            tell(f"{'+'.join(names)}: failed: {error}")
        document["pairs"] = [pair.to_json() for pair in found.values()]
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=1) + "\n")
    for line in table(list(found.values())):
        tell(line)
    return list(found.values())


def table(results: Sequence[PairResult]) -> list[str]:
    """A row per pair, a column per way: solo seconds of work per second, relative to turns as graphs."""
    ways = list(dict.fromkeys(row.way for result in results for row in result.ways))
    lines = ["| pair | " + " | ".join(ways) + " |", "|---" * (len(ways) + 1) + "|"]
    for result in results:
        base = result.work("temporal") or 1.0
        cells = []
        for way in ways:
            work = result.work(way)
            cells.append("" if work is None else f"{work / base:.2f}")
        lines.append(f"| {'+'.join(result.names)} | " + " | ".join(cells) + " |")
    return lines
