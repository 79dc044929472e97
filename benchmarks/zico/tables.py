"""The tables of docs/zico.md, as frames of text drawn from a results document."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter

import numpy as np
import pandas as pd

from .cases import CHANGING, FIGURE_8, SAMPLED
from .colocated import ALL_MEMORY, CHANGES, excess_way
from .pair import TEMPORAL, UNLIMITED
from .results import Document, pair_frame

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
_EXCESS = 1.3
_LEAST_GAIN = 1.05
"""Unlimited gains below this are too small to say which part of them is kept: runs differ by about 1%."""


def gains(document: Document) -> pd.DataFrame:
    """Numbers by pair: work over that of turns, without a limit, with all memory, and in tight budgets.

    ``lowest`` is the mean over all stays in the smallest budget that was run, which both jobs' peaks exceed
    by ``excess``. Figure 8's pairs come first, then pairs of equal jobs, then others; pairs at other batch
    sizes come last.
    """
    frame = pair_frame(document)
    first = ["+".join(names) for names in FIGURE_8]
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
            "order": ("@" in pair, place, not is_equal),
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
    tight = frame["pair"].isin(["+".join(names) for names in SAMPLED]) & frame["is_tight"]
    changing = frame["pair"].isin(["+".join(names) for names in CHANGING]) & frame["way"].isin(CHANGES)
    found = []
    for row in frame[tight | changing].itertuples():
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
    record = document["memory"].get("nasnet", {"lifespans": {}})
    paper = {"feature maps": "134 and 234 ms", "others": "18 and 2 ms"}
    found = [
        {
            "tensors": name,
            "number": row["count"],
            "MiB in all": f"{row['bytes'] / MIB:.0f}",
            "mean lifespan, ms": f"{1e3 * row['mean_seconds']:.1f}",
            "median lifespan, ms": f"{1e3 * row['median_seconds']:.1f}",
            "paper, mean and median": paper[name],
        }
        for name, row in record["lifespans"].items()
    ]
    return pd.DataFrame(found)


def memory_table(document: Document) -> pd.DataFrame:
    """Figures 2 and 6: one iteration of each model, and what two of it need."""
    found = []
    for name, record in document["memory"].items():
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


TABLES: dict[str, Callable[[Document], pd.DataFrame]] = {
    "pairs": pairs_table,
    "baselines": baselines_table,
    "lifespans": lifespans_table,
    "memory": memory_table,
    "budgets": budgets_table,
}


def _text(values: pd.Series, form: str = "{:.2f}") -> pd.Series:
    return values.map(lambda value: "–" if pd.isna(value) else form.format(value)).astype(str)
