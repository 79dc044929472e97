"""``python -m benchmarks report``: tables and charts of results, by pandas and matplotlib."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from .records import read


def command(
    file: Annotated[Path, typer.Argument(help="Results of step, plans, zoo or overhead.")],
    markdown: Annotated[bool, typer.Option(help="Print tables as Markdown.")] = False,
    chart: Annotated[Path | None, typer.Option(help="Draw a chart: SVG, PNG or PDF.")] = None,
) -> None:
    """Print the tables of a file of results, and draw its chart."""
    document = read(file)
    tables = {"step": step_tables, "plans": plan_tables, "zoo": zoo_tables}.get(
        document["benchmark"], plain_tables
    )(document)
    for title, table in tables.items():
        print(f"{title}\n\n{as_markdown(table) if markdown else table.map(_cell).to_string()}\n")
    for run in document["runs"]:
        made_with = f"{run['device']}, torch {run['torch']}, commit {run.get('commit', '?')[:12]}"
        print(f"- {run['date'][:10]}, {made_with}: `{run['command']}`")
    for row in document["rows"]:
        if "error" in row:
            names = [
                str(row[name]) for name in ("workload", "model", "width", "way", "policy") if name in row
            ]
            print(f"- failed: {', '.join(names)}: {row['error']}")
    if chart is not None:
        chart.parent.mkdir(parents=True, exist_ok=True)
        draw(document, tables, chart)


def step_tables(document: dict[str, Any]) -> dict[str, Any]:
    """Times per member, times over that of trainmux with their geometric mean, and peak memory."""
    import numpy as np
    import pandas as pd

    rows = pd.DataFrame(document["rows"])
    rows["fleet"] = [f"{row.width} × {row.workload}, batch {row.batch_size}" for row in rows.itertuples()]

    def by_way(column: str) -> pd.DataFrame:
        return rows.pivot_table(column, "fleet", "way", sort=False)

    times = by_way("median_ms")
    tables = {"Milliseconds per member and step": times}
    if "trainmux" in times:
        faster = times.drop(columns="trainmux").div(times["trainmux"], axis=0)
        widths = faster.index.str.split(" ").str[0]
        means = np.exp(np.log(faster).groupby(widths).mean())
        means.index = pd.Index([f"{width} members, geometric mean" for width in means.index])
        tables["How many times faster trainmux is"] = pd.concat([faster, means])
    if "reserved_bytes" in rows:
        tables["Peak memory reserved by torch, GiB"] = by_way("reserved_bytes") / 2**30
    tables["Seconds until the first step is done"] = by_way("build_s")
    for row, fleet in zip(document["rows"], rows.fleet, strict=True):
        if "kernels" in row:
            title = f"Kernels of {fleet}, {row['way']}, ms per member and step"
            tables[title] = pd.DataFrame(row["kernels"]).set_index("ms")
    return tables


def plan_tables(document: dict[str, Any]) -> dict[str, Any]:
    """Per workload: step time, measured and predicted, memory against budget, and planning time."""
    import pandas as pd

    rows = pd.DataFrame(document["rows"])
    tables = {}
    for (workload, width, batch_size), group in rows.groupby(["workload", "width", "batch_size"], sort=False):
        table = group.assign(
            budget_gib=group.get("budget_bytes", pd.Series(dtype=float)) / 2**30,
            predicted_gib=group.get("predicted_bytes", pd.Series(dtype=float)) / 2**30,
        )
        if "device_bytes" in group:
            table["device_gib"] = group.device_bytes / 2**30
        columns = ["widths", "step_ms", "predicted_ms", "bound_ms", "budget_gib"]
        columns += ["predicted_gib", "device_gib", "planning_s", "recompute_share", "swap_overlap"]
        table = table[[name for name in columns if name in table]]
        table.index = pd.Index(group.share + " " + group.policy, name="share, policy")
        tables[f"{width} × {workload}, batch {batch_size}"] = table
    return tables


def zoo_tables(document: dict[str, Any]) -> dict[str, Any]:
    """By family how many are fused, captured and right, and what became of each of the others."""
    import pandas as pd

    rows = pd.DataFrame([row for row in document["rows"] if row["verdict"] != "absent"])
    rows["right"] = rows.verdict == "right"
    columns = {"loss_error": "largest loss error", "update_error": "largest update error"}
    columns |= {"build_s": "median s to first step"}

    def summary(group: Any) -> Any:
        right = group[group.right]
        values = [right.loss_error.max(), right.update_error.max(), right.build_s.median()]
        return pd.Series([len(group), len(right), *values], ["models", "right", *columns.values()])

    families = {name: summary(group) for name, group in rows.groupby("family", sort=False)}
    table = pd.DataFrame([*families.values(), summary(rows)], index=[*families, "all"])
    table[["models", "right"]] = table[["models", "right"]].astype(int)
    others = pd.DataFrame(
        [
            {
                "model": row["model"],
                "verdict": row["verdict"],
                "because": _brief(row.get("message") or row.get("not_captured") or row.get("error") or ""),
                "remedy": f"{row['remedy']}: {row['with_remedy']}" if "remedy" in row else "",
            }
            for row in document["rows"]
            if row["verdict"] not in ("right", "absent")
        ],
        columns=["model", "verdict", "because", "remedy"],
    )
    return {"Architectures by family": table, "All others": others.set_index("model")}


def _brief(message: str) -> str:
    """An error without the folders of its paths."""
    return re.sub(r"/\S*/", "", message).replace("|", "/")


def plain_tables(document: dict[str, Any]) -> dict[str, Any]:
    import pandas as pd

    rows = pd.DataFrame(document["rows"]).drop(columns=["run", "detail", "error"], errors="ignore")
    return {document["benchmark"]: rows.set_index(rows.columns[0])}


def as_markdown(table: Any) -> str:
    """Format a table for a page."""
    return str(table.map(_cell).to_markdown(disable_numparse=True))


def _cell(value: Any) -> Any:
    """Three digits that count, and a dash for what was not measured."""
    if not isinstance(value, float):
        return value
    return "–" if value != value else f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def draw(document: dict[str, Any], tables: dict[str, Any], path: Path) -> None:
    """Bars of speed for ``step``, step time over budget for ``plans``."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "trainmux"}
    from matplotlib import pyplot

    if document["benchmark"] == "step" and len(tables) > 1:
        table = tables["How many times faster trainmux is"]
        axes = table.plot.barh(figsize=(8, 1 + 0.45 * len(table)), logx=True, width=0.8)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.invert_yaxis()
        axes.set_xlabel("times slower than trainmux")
        axes.set_ylabel("")
    elif document["benchmark"] == "plans":
        _, axes = pyplot.subplots(figsize=(8, 5))
        for title, table in tables.items():
            column = "step_ms" if "step_ms" in table else "predicted_ms"
            for policy, group in table.groupby(table.index.str.split(" ").str[1]):
                if len(group) > 1:
                    whole = group[column].min()
                    line = group.sort_values("budget_gib")
                    axes.plot(line.budget_gib, line[column] / whole, marker="o", label=f"{title}, {policy}")
        axes.set_xlabel("budget, GiB")
        axes.set_ylabel("step time, relative")
        axes.legend(fontsize=7)
    else:
        raise SystemExit(f"there is no chart of {document['benchmark']}")
    pyplot.tight_layout()
    pyplot.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
