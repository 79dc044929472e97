"""The paper's figures of two jobs side by side: throughput, and memory over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .tables import number
from .zico import CHANGES, EAGER_TEMPORAL, EAGER_THREADS, ROOMY, TEMPORAL, UNLIMITED
from .zico_cases import base_name
from .zico_draw import Bar, Mark, bars, stacked
from .zico_jobs import PairResult
from .zico_plan import FIGURE_8
from .zico_processes import KINDS, OVERSUBSCRIBED, process_way
from .zico_results import MIB, Figure, Results, kept_gain, over_temporal, pair_name, tight_ways, times

_FIGURE_8_CLAIMS = {"rhn+gnmt": 1.42, "nasnet+gnmt": 1.46, "bert+gnmt": 1.27, "nasnet+resnet110": 1.15}
_SAME_MODEL_CLAIMS = {"nasnet": "1.35 on average", "gnmt": "1.37 on average"}
_PROCESS_WAYS = tuple(process_way(kind, has_mps=has_mps) for has_mps in (False, True) for kind in KINDS)
_SHOWN_WAYS = (UNLIMITED, ROOMY, EAGER_TEMPORAL, EAGER_THREADS, *_PROCESS_WAYS)


def figure_5(results: Results) -> Figure:
    """Equal jobs."""
    name, title = "Figure 5", "Throughput in training the same models"
    claim = (
        "Zico is above Temporal for all models and batch sizes, on average by 35% for NASNet and 37% for "
        "GNMT; like MPS where memory suffices, and up to 4.7 times faster where it does not."
    )
    pairs = [pair for pair in results.pairs if base_name(pair.names[0]) == base_name(pair.names[1])]
    if not pairs:
        return Figure(name, title, claim, left_out="no two jobs of the same model were measured in this run")
    table = [_pair_headings(pairs)]
    for pair in pairs:
        said = _SAME_MODEL_CLAIMS.get(base_name(pair.names[0]), "above 1")
        table.append((*_pair_cells(pair, pairs), said))
    picture = bars("Work over Temporal, two equal jobs", _pair_bars(pairs), mark=Mark("Temporal", 1.0))
    return Figure(
        name,
        title,
        claim,
        _measured_on(results),
        {"figure_5": picture},
        table,
        [*_raised_notes(pairs), *_process_notes(results, pairs)],
    )


def figure_7(results: Results) -> Figure:
    """Equal jobs over time."""
    name, title = "Figure 7", "Memory usage over time for training the same models"
    claim = "ResNet-110 runs with TimeShift ≈ 0; BERT with a slight delay of every iteration."
    pairs = {f"figure_7_{model}": (model, model) for model in ("resnet110", "bert")}
    return _over_time(results, name, title, claim, pairs, "a pair")


def figure_8(results: Results) -> Figure:
    """Different jobs."""
    name, title = "Figure 8", "Throughput in training the distinct models concurrently"
    claim = (
        "Over Temporal: RHN+GNMT 1.42, NASNet+GNMT 1.46, BERT+GNMT 1.27, NASNet+ResNet-110 1.15. Over MPS "
        "with more memory than the card has: 5.1, 8.3, 6 and 6.5 times at most."
    )
    distinct = [pair for pair in results.pairs if base_name(pair.names[0]) != base_name(pair.names[1])]
    if not distinct:
        return Figure(
            name, title, claim, left_out="no two jobs of different models were measured in this run"
        )
    paper = [pair_name(pair) for pair in FIGURE_8]
    distinct.sort(key=lambda pair: _place(pair_name(list(map(base_name, pair.names))), paper))
    table = [(*_pair_headings(distinct)[:-1], "part of the unlimited gain kept", "paper")]
    for pair in distinct:
        kept = [times(kept_gain(pair, way)) for way in tight_ways(pair)]
        said = _FIGURE_8_CLAIMS.get(pair_name(list(map(base_name, pair.names))))
        table.append((*_pair_cells(pair, distinct), ", ".join(kept) or "–", times(said)))
    absent = [pair for pair in paper if not any(_is_pair(pair, row) for row in distinct)]
    notes = [f"Not measured in this run: {', '.join(absent)}."] if absent else []
    picture = bars("Work over Temporal, two different jobs", _pair_bars(distinct), mark=Mark("Temporal", 1.0))
    return Figure(
        name,
        title,
        claim,
        _measured_on(results),
        {"figure_8": picture},
        table,
        [*notes, *_raised_notes(distinct), *_process_notes(results, distinct)],
    )


def figure_9(results: Results) -> Figure:
    """Unequal jobs over time."""
    name, title = "Figure 9", "Memory usage over time for training NASNet and ResNet-110 concurrently"
    claim = "ResNet-110, whose iterations are shorter, runs several of them in the lows of NASNet's memory."
    return _over_time(results, name, title, claim, {"figure_9": ("nasnet", "resnet110")}, "the pair")


def _over_time(
    results: Results, name: str, title: str, claim: str, pairs: dict[str, tuple[str, str]], wanted: str
) -> Figure:
    """What two jobs hold over time, for each of ``pairs``, which go by the names of their pictures."""
    pictures: dict[str, str] = {}
    table: list[tuple[str, ...]] = []
    produced: dict[str, None] = {}
    for picture, pair in pairs.items():
        _side_by_side(results, pair, picture, pictures, table, produced)
    if not pictures:
        models = list(dict.fromkeys(model for pair in pairs.values() for model in pair))
        return Figure(name, title, claim, left_out=results.why_not(models, wanted))
    return Figure(name, title, claim, "; ".join(produced), pictures, [_SIDE_HEADINGS, *table])


def figure_10(results: Results) -> Figure:
    """A budget that changes."""
    name, title = "Figure 10", "Memory usage patterns on dynamic memory budget changes"
    claim = (
        "Two NASNets: 70% of the card's memory, then 50%, then 70% again. No delay at first, 140 ms between "
        "iterations in the middle, none at the end; more than 70% changes nothing."
    )
    pictures: dict[str, str] = {}
    table: list[tuple[str, ...]] = []
    produced: list[str] = []
    for pair in results.pairs:
        rows = [row for way in CHANGES if (row := pair.row(way)) is not None]
        if not rows:
            continue
        produced.append(f"{pair_name(pair.names)} on {results.device}")
        whole = sum(pair.local_bytes) + sum(pair.peak_bytes)
        samples: list[list[float]] = []
        begin = 0.0
        for row in rows:
            change, detail = row.detail.get("change"), row.detail
            pause = "" if change is None else number(1e3 * max(change["longest_gap_seconds"]))
            table.append(
                (
                    f"{pair_name(pair.names)}, measured",
                    row.way.removeprefix("co-located, "),
                    f"{detail['budget_bytes'] / whole:.0%}",
                    number(detail["budget_bytes"] / MIB),
                    " and ".join(number(rate) for rate in row.iterations_per_second),
                    _held_text(detail),
                    "" if change is None else number(1e3 * change["in_force_after_seconds"]),
                    pause,
                )
            )
            for sample in detail.get("samples", []):
                samples.append([1e3 * (begin + sample[0]), *(size / MIB for size in sample[1:])])
            begin += detail["samples"][-1][0] if detail.get("samples") else 0.0
        if samples:
            marks = [Mark(row.way.split(", ")[1], row.detail["budget_bytes"] / MIB) for row in rows[:2]]
            pictures[f"figure_10_{_plain(pair.names)}"] = stacked(
                f"{pair_name(pair.names)} on {results.device}, a piece of each budget",
                "milliseconds",
                "MiB",
                list(pair.names),
                samples,
                marks,
            )
    simulated = results.simulated(("nasnet", "nasnet")) or results.simulated(("nasnet", "resnet110"))
    simulated = simulated or next(iter(results.simulated_pairs()), None)
    if simulated is not None:
        produced.append(f"{pair_name(simulated['names'])} on {results.simulated_on(simulated)}")
        change = simulated["change"]
        for row in change["phases"]:
            table.append(
                (
                    f"{pair_name(simulated['names'])}, simulated",
                    row["way"].removeprefix("co-located, "),
                    f"{row['budget_bytes'] / simulated['whole_bytes']:.0%}",
                    number(row["budget_bytes"] / MIB),
                    " and ".join(number(rate) for rate in row["iterations_per_second"]),
                    number(row["most_bytes"] / MIB),
                    "",
                    "",
                )
            )
        marks = [
            Mark("AB"[place], 1e3 * moment, is_vertical=True)
            for place, (moment, _) in enumerate(change["budgets"][1:])
        ]
        marks += [Mark(f"{number(size / MIB)} MiB", size / MIB) for _, size in change["budgets"][:2]]
        pictures["figure_10_simulated"] = stacked(
            f"{pair_name(simulated['names'])}, simulated",
            "milliseconds",
            "MiB",
            simulated["names"],
            _in_ms_and_mib(change["held"]),
            marks,
        )
    if not table:
        return Figure(name, title, claim, left_out="no budget was changed during a run")
    headings = ("pair", "budget", "of all that both need", "MiB", "iterations per second", "most MiB held")
    notes = ["A budget that is too small even for turns is raised to the least that can work."]
    return Figure(
        name,
        title,
        claim,
        "; ".join(produced),
        pictures,
        [(*headings, "in force after ms", "longest gap between iterations meanwhile, ms"), *table],
        notes,
    )


# ---- parts ---------------------------------------------------------------------------------------------

_SIDE_HEADINGS = ("pair", "on", "budget", "MiB", "iterations", "shift of an iteration, ms", "most MiB held")


def _side_by_side(
    results: Results,
    models: tuple[str, str],
    stem: str,
    pictures: dict[str, str],
    table: list[tuple[str, ...]],
    produced: dict[str, None],
) -> None:
    """A pair's memory over time, measured and simulated, whichever there is; drawn in its tightest budget."""
    pair, simulated = results.pair(models), results.simulated(models)
    runs: list[tuple[str, str, Mapping[str, Any], str, Sequence[Sequence[float]]]] = []
    if pair is not None:
        for way in tight_ways(pair):
            produced[f"{pair_name(pair.names)} on {results.device}, as the dispatcher sees it"] = None
            row = pair.row(way)
            assert row is not None
            samples = row.detail.get("samples", [])
            runs.append((stem, results.device, row.detail | {"way": way}, _held_text(row.detail), samples))
    if simulated is not None:
        produced[f"{pair_name(simulated['names'])} on {results.simulated_on(simulated)}"] = None
        for way, run in simulated["runs"].items():
            most = number(run["most_bytes"] / MIB)
            runs.append((f"{stem}_simulated", "simulated", run | {"way": way}, most, run["held"]))
    names = pair.names if pair is not None else simulated["names"] if simulated is not None else ()
    for _, where, run, most, _ in runs:
        table.append(_side_row(names, where, run, most))
    for picture in dict.fromkeys(run[0] for run in runs):
        drawn = [run for run in runs if run[0] == picture and run[4]]
        if not drawn:
            continue
        _, where, run, _, rows = min(drawn, key=lambda row: row[2]["budget_bytes"])
        pictures[picture] = stacked(
            f"{pair_name(names)}, {where}, {_label(run['way'])}",
            "milliseconds",
            "MiB",
            list(names),
            _in_ms_and_mib(rows),
            [Mark("budget", run["budget_bytes"] / MIB)],
        )


def _label(way: str) -> str:
    return way.removeprefix("co-located, ")


def _side_row(names: Sequence[str], where: str, row: Mapping[str, Any], most: str) -> tuple[str, ...]:
    shifts = [
        number(1e3 * shift / max(1, count))
        for shift, count in zip(row["shift_seconds"], row["iterations"], strict=True)
    ]
    ratio = " : ".join(map(str, row["iterations"]))
    size = number(row["budget_bytes"] / MIB)
    return pair_name(names), where, _label(row["way"]), size, ratio, " and ".join(shifts), most


def _held_text(detail: Mapping[str, Any]) -> str:
    """What the device had in use, where it could be asked."""
    return number(detail["device_bytes"] / MIB) if detail.get("device_bytes") else "–"


def _in_ms_and_mib(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    begin = rows[0][0] if rows else 0.0
    return [[1e3 * (row[0] - begin), *(size / MIB for size in row[1:])] for row in rows]


def _pair_columns(pairs: Sequence[PairResult]) -> list[str]:
    tight = sorted({way for pair in pairs for way in tight_ways(pair)}, key=_budget_order)
    measured = {row.way for pair in pairs for row in pair.ways}
    return [way for way in (UNLIMITED, ROOMY, *tight, *_SHOWN_WAYS[2:]) if way in measured]


def _budget_order(way: str) -> tuple[bool, float]:
    """By what peaks exceed it; behind those, the paper's machines."""
    label = _label(way)
    return label.endswith("GiB"), float(label.removesuffix("x").removesuffix(" GiB"))


def _pair_headings(pairs: Sequence[PairResult]) -> tuple[str, ...]:
    return ("pair", "Temporal, iterations per second", *_pair_columns(pairs), "paper")


def _pair_cells(pair: PairResult, pairs: Sequence[PairResult]) -> tuple[str, ...]:
    base = pair.row(TEMPORAL)
    rates = "–" if base is None else " and ".join(number(rate) for rate in base.iterations_per_second)
    ways = [times(over_temporal(pair, way)) for way in _pair_columns(pairs)]
    return (pair_name(pair.names), rates, *ways)


def _pair_bars(pairs: Sequence[PairResult]) -> list[tuple[str, list[Bar]]]:
    ways = _pair_columns(pairs)
    return [
        (
            pair_name(pair.names),
            [Bar(way, value) for way in ways if (value := over_temporal(pair, way)) is not None],
        )
        for pair in pairs
    ]


def _raised_notes(pairs: Sequence[PairResult]) -> list[str]:
    """Which budgets are not what they are called, because less would not even do for turns."""
    notes = []
    for pair in pairs:
        rows = [row for way in tight_ways(pair) if (row := pair.row(way)) is not None]
        least = [row for row in rows if row.detail["budget_bytes"] == row.detail["smallest_budget_bytes"]]
        if least:
            excess = (sum(pair.local_bytes) + sum(pair.peak_bytes)) / least[0].detail["budget_bytes"]
            ways = ", ".join(_label(row.way) for row in least)
            notes.append(
                f"{pair_name(pair.names)}, {ways}: in the smallest budget that can work, which both jobs' "
                f"peaks exceed {excess:.2f} times."
            )
    return notes


def _process_notes(results: Results, pairs: Sequence[PairResult]) -> list[str]:
    failed = {row["way"]: row["error"] for row in results.document["failed"] if row["way"] in _PROCESS_WAYS}
    measured = {row.way for pair in pairs for row in pair.ways}
    notes = [f"{way}: {error}" for way, error in failed.items() if way not in measured]
    if not failed and not measured & set(_PROCESS_WAYS):
        notes.append("Two processes and MPS were not measured for these pairs (`--processes`).")
    return [*notes, f"{OVERSUBSCRIBED}."]


def _measured_on(results: Results) -> str:
    settings = results.document["settings"]
    return f"{results.device}, {settings['precision']}, {settings['seconds']:g} s a way"


def _place(name: str, order: Sequence[str]) -> int:
    return order.index(name) if name in order else len(order)


def _is_pair(name: str, pair: PairResult) -> bool:
    return sorted(name.split("+")) == sorted(map(base_name, pair.names))


def _plain(names: Sequence[str]) -> str:
    """For the name of a file."""
    return "_".join("".join(c if c.isalnum() else "_" for c in name) for name in names)
