"""The tables of docs/zico.md, as frames of text drawn from a document of results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd

from .cases import find_zico_case
from .cells import (
    ALONE,
    EVERY_KERNEL,
    HOST_VIEW,
    ITERATION,
    NO_TRACKING,
    PAPER_SIZES,
    TEMPORAL,
    TRACKING,
    UNLIMITED,
)
from .colocated import ALL_MEMORY, CHANGES, excess_way

Document = Mapping[str, Any]
MIB, GIB = 1 << 20, 1 << 30
PAPER_GAINS = {
    "rhn+gnmt": 1.42,
    "nasnet+gnmt": 1.46,
    "bert+gnmt": 1.27,
    "nasnet+resnet110": 1.15,
    "nasnet+nasnet": 1.35,
    "gnmt+gnmt": 1.37,
}
"""Zico over Temporal: Figure 8, and the means over batch sizes that the text gives for Figure 5."""
PAPER_TRACKING = {
    "nasnet": ("78%", "100%", "100%"),
    "resnet110": ("91%", "100%", "100%"),
    "resnet50": ("97%", "100%", "100%"),
    "gnmt": ("44%", "89%", "97%"),
    "rhn": ("94%", "99%", "99%"),
    "bert": ("97%", "99%", "100%"),
}
"""Table 1: an event behind every kernel, every 8 MB and every 256 MB."""
PAPER_REGIONS = {
    "nasnet": "94%",
    "resnet110": "99%",
    "resnet50": "100%",
    "gnmt": "97%",
    "rhn": "99%",
    "bert": "99%",
}
"""Table 2: regions of 512 KB."""
_EXCESS = 1.3
_LEAST_GAIN = 1.05
"""Unlimited gains below this are too small to say which part of them is kept: runs differ by about 1%."""
_COLUMNS = (
    *("pair", "is_equal", "way", "first_rate", "work", "excess"),
    *("budget_bytes", "smallest_budget_bytes"),
)


def rows_of(document: Document, experiment: str) -> list[Mapping[str, Any]]:
    """What was measured of one experiment, errors left out."""
    return [row for row in document["rows"] if row["experiment"] == experiment and "error" not in row]


def pair_frame(document: Document) -> pd.DataFrame:
    """A row for each way of each pair, or of more jobs, that were also run alone and in turn.

    ``work`` counts solo seconds per second: an iteration counts as much as it takes alone, as a graph.
    ``gain`` is work over that of turns, ``excess`` what all jobs need at their peaks over the budget.
    ``is_tight`` marks budgets below that, other than Figure 10's.
    """
    trained = rows_of(document, "train")
    alone = {row["jobs"]: row["solo_ms"] for row in trained if row["way"] == ALONE}
    rows = []
    for way in trained:
        if way["jobs"] not in alone or way["way"] == ALONE:
            continue
        rates = way["iterations_per_second"]
        work = sum(rate * solo / 1e3 for rate, solo in zip(rates, alone[way["jobs"]], strict=True))
        row = {"pair": way["jobs"], "is_equal": len(set(way["jobs"].split("+"))) == 1}
        if "budget_bytes" in way:
            row["excess"] = sum(way["local_bytes"] + way["peak_bytes"]) / way["budget_bytes"]
        rows.append({**row, "first_rate": rates[0], "work": work, **way})
    frame = pd.DataFrame(rows)
    frame = frame.reindex(columns=list(dict.fromkeys([*_COLUMNS, *frame.columns])))
    in_turns = frame[frame["way"] == TEMPORAL].set_index("pair")["work"]
    frame["gain"] = frame["work"] / frame["pair"].map(in_turns)
    frame["is_tight"] = frame["budget_bytes"].notna() & ~frame["way"].isin([ALL_MEMORY, *CHANGES])
    frame["is_smallest"] = frame["is_tight"] & (frame["budget_bytes"] <= frame["smallest_budget_bytes"])
    return frame


def gains(document: Document) -> pd.DataFrame:
    """Numbers by pair: work over that of turns, without a limit, with all memory, and in tight budgets.

    ``lowest`` is the mean over all stays in the smallest budget that was run, which both jobs' peaks exceed
    by ``excess``. Figure 8's pairs come first, then pairs of equal jobs, then others; pairs at other batch
    sizes, and more jobs than two, come last.
    """
    frame = pair_frame(document)
    first = [pairs[0] for pairs in PAPER_SIZES.figure_8]
    rows = []
    for pair, ways in frame.groupby("pair", sort=False):
        by_way = ways.set_index("way")
        tight = ways[ways["is_tight"]]
        lowest = tight[tight["budget_bytes"] == tight["budget_bytes"].min()]
        middle = tight[(tight["way"] == excess_way(_EXCESS)) & ~tight["is_smallest"]]
        place = first.index(pair) if pair in first else len(first)
        is_equal = bool(ways["is_equal"].all())
        row = {
            "pair": pair,
            "order": (pair.count("+"), "@" in pair, place, not is_equal),
            "is_equal": is_equal,
            "temporal": by_way["first_rate"].get(TEMPORAL),
            "unlimited": by_way["gain"].get(UNLIMITED),
            "all": by_way["gain"].get(ALL_MEMORY),
            "middle": middle["gain"].mean(),
            "lowest": lowest["gain"].mean(),
            "excess": lowest["excess"].mean(),
            "paper": PAPER_GAINS.get(pair),
        }
        rows.append(row)
    columns = ["pair", "is_equal", "temporal", "unlimited", "all", "middle", "lowest", "excess", "paper"]
    rows.sort(key=itemgetter("order"))
    numbers = dict.fromkeys(columns[2:], float)
    return pd.DataFrame(rows, columns=columns).astype(numbers).set_index("pair")


def pairs_table(document: Document) -> pd.DataFrame:
    found = gains(document)
    table = pd.DataFrame(index=found.index)
    table["Temporal, iterations/s"] = _text(found["temporal"], "{:.1f}")
    table["paper"] = _text(found["paper"])
    table["two streams, no limit"] = _text(found["unlimited"])
    table["co-located, all memory"] = _text(found["all"])
    table[f"peaks exceed budget {_EXCESS}×"] = _text(found["middle"])
    table["smallest budget run"] = _text(found["lowest"])
    table["peaks exceed it"] = _text(found["excess"], "{:.2f}×")
    kept = (found["lowest"] - 1) / (found["unlimited"] - 1)
    table["gain kept there"] = _text(kept.where(found["unlimited"] >= _LEAST_GAIN), "{:.0%}")
    return table.reset_index()


def baselines_table(document: Document) -> pd.DataFrame:
    """Ways without trainmux, over turns as graphs."""
    frame = pair_frame(document)
    others = frame[frame["budget_bytes"].isna() & ~frame["way"].isin([TEMPORAL, UNLIMITED])]
    if others.empty:
        return pd.DataFrame(columns=["pair"])
    table = others.pivot(index="pair", columns="way", values="gain").reindex(columns=others["way"].unique())
    order = [pair for pair in gains(document).index if pair in table.index]
    return table.loc[order].apply(_text).rename_axis(columns=None).reset_index()


def budgets_table(document: Document) -> pd.DataFrame:
    """Figures 7, 9 and 10: shifts, bytes and pauses in tight budgets, and in budgets that change."""
    frame = pair_frame(document)
    sampled = frame.get("samples", pd.Series(dtype=object)).notna()
    found = []
    for row in frame[sampled].itertuples():
        change = row.change or {"in_force_after_seconds": np.nan, "longest_gap_seconds": [np.nan]}
        shifts = zip(row.shift_seconds, row.iterations, strict=True)
        found.append(
            {
                "pair": row.pair,
                "asked for": row.way.removeprefix("co-located, ").replace("x", "×"),
                "budget, MiB": f"{row.budget_bytes / MIB:.0f}",
                "of all that both need": f"{1 / row.excess:.0%}",
                "most used, MiB": f"{row.device_bytes / MIB:.0f}",
                "iterations/s": " and ".join(f"{rate:.1f}" for rate in row.iterations_per_second),
                "shift, ms": " and ".join(f"{1e3 * shift / max(1, num):.1f}" for shift, num in shifts),
                "in force after, ms": f"{1e3 * change['in_force_after_seconds']:.0f}",
                "longest gap, ms": f"{1e3 * max(change['longest_gap_seconds']):.0f}",
            }
        )
    return pd.DataFrame(found)


def lifespans_table(document: Document) -> pd.DataFrame:
    """Figure 1: NASNet's tensors."""
    record = iterations(document).get("nasnet", {"lifespans": {}})
    paper = {"feature maps": "134 and 234 ms", "others": "18 and 2 ms"}
    found = [
        {
            "tensors": name,
            "number": str(row["count"]),
            "MiB in all": f"{row['bytes'] / MIB:.0f}",
            "mean lifespan, ms": f"{1e3 * row['mean_seconds']:.1f}",
            "median lifespan, ms": f"{1e3 * row['median_seconds']:.1f}",
            "paper, mean and median": paper[name],
        }
        for name, row in record["lifespans"].items()
    ]
    return pd.DataFrame(found)


def iterations(document: Document) -> dict[str, Mapping[str, Any]]:
    """Figures 1 and 2: one job's memory by name."""
    return {row["jobs"]: row for row in rows_of(document, "memory") if row["way"] == ITERATION}


def memory_table(document: Document) -> pd.DataFrame:
    """Figure 2: one iteration of each model."""
    found = []
    for name, record in iterations(document).items():
        moments, sizes = np.array(record["curve"]).T
        above = np.diff(moments)[sizes[:-1] > record["peak_bytes"] / 2].sum() / record["seconds"]
        found.append(
            {
                "job": name,
                "lowest, MiB": f"{record['lowest_bytes'] / MIB:.0f}",
                "peak, MiB": f"{record['peak_bytes'] / MIB:.0f}",
                "peak over lowest": f"{record['peak_bytes'] / record['lowest_bytes']:.1f}",
                "time above half the peak": f"{above:.0%}",
                "two of them, GiB": f"{2 * record['peak_bytes'] / GIB:.1f}",
            }
        )
    return pd.DataFrame(found)


def tracking_table(document: Document) -> pd.DataFrame:
    """Table 1: work with cuts at several distances, over that with none."""
    rates = _rates(document, "tracking")
    found = []
    for job, ways in rates.items():
        if NO_TRACKING in ways:
            whole = ways[NO_TRACKING]
            here = {way: f"{ways[way] / whole:.0%}" if way in ways else "–" for way in TRACKING}
            paper = dict(zip((EVERY_KERNEL, "8 MB", "256 MB"), PAPER_TRACKING.get(job, "–––"), strict=True))
            shown = {
                f"{way}{said}": value
                for way in paper
                for said, value in ((", paper", paper[way]), ("", here[way]))
            }
            found.append({"job": job, **shown})
    return pd.DataFrame(found)


def regions_table(document: Document) -> pd.DataFrame:
    """Table 2: work of two equal jobs in small regions, over that in large ones."""
    rates = _rates(document, "regions")
    ways = list(dict.fromkeys(way for row in rates.values() for way in row))
    found = []
    for jobs, row in rates.items():
        if len(row) == len(ways):
            *small, large = (row[way] for way in ways)
            shown = {
                f"{way} over {ways[-1]}": f"{rate / large:.0%}"
                for way, rate in zip(ways, small, strict=False)
            }
            found.append(
                {"jobs": jobs, "512 KB, paper": PAPER_REGIONS.get(jobs.partition("+")[0], "–"), **shown}
            )
    return pd.DataFrame(found)


def _rates(document: Document, experiment: str) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for row in rows_of(document, experiment):
        found.setdefault(row["jobs"], {})[row["way"]] = sum(row["iterations_per_second"])
    return found


def host_table(document: Document) -> pd.DataFrame:
    """Figure 3: how far the host is ahead of the device."""
    return pd.DataFrame(
        {
            "job": row["jobs"],
            "iterations enqueued after, ms": f"{1e3 * row['enqueued_seconds']:.1f}",
            "and ended after, ms": f"{1e3 * row['seconds']:.1f}",
        }
        for row in rows_of(document, "memory")
        if row["way"] == HOST_VIEW
    )


def missing_table(document: Document) -> pd.DataFrame:
    """What failed, and why."""
    return pd.DataFrame(
        {"cell": f"{row['experiment']}: {row['jobs']}, {row['way']}", "error": row["error"].replace("|", "/")}
        for row in document["rows"]
        if "error" in row
    )


def notes(document: Document) -> list[str]:
    """What the names of jobs stand for."""
    names = dict.fromkeys(name for row in document["rows"] for name in row["jobs"].split("+"))
    return [f"- `{name}`: {find_zico_case(name).note}" for name in names]


TABLES: dict[str, Callable[[Document], pd.DataFrame]] = {
    "pairs": pairs_table,
    "baselines": baselines_table,
    "lifespans": lifespans_table,
    "memory": memory_table,
    "host": host_table,
    "budgets": budgets_table,
    "tracking": tracking_table,
    "regions": regions_table,
    "failed": missing_table,
}


def _text(values: pd.Series, form: str = "{:.2f}") -> pd.Series:
    return values.map(lambda value: "–" if pd.isna(value) else form.format(value)).astype(str)
