"""Tables of README and docs that are written by hand: every number in them is in the committed results."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
GIB = 1 << 30
WORKLOADS = {
    "BERT-base": "bert_base_mlm_no_dropout",
    "GPT-2": "gpt2_no_dropout",
    "ViT-B/16": "vit_b16",
    "DLRM": "dlrm",
    "ResNet-101": "resnet101",
    "MobileNetV3-Large": "mobilenet_v3_large",
    "MLP": "mlp",
    "small CNN": "small_cnn",
    "DenseNet-121": "sample:densenet121",
    "EfficientNet-B0": "sample:efficientnet_b0",
    "ConvNeXt-T": "sample:convnext_tiny",
}


def results(name: str) -> list[dict[str, Any]]:
    path = REPOSITORY / "benchmarks" / "results" / name
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return found


def table(page: str, after: str) -> list[dict[str, str]]:
    """The first table behind a line that begins with ``after``, as rows by column."""
    _, text = (REPOSITORY / page).read_text(encoding="utf-8").split(f"\n{after}", 1)
    lines = text[text.index("\n|") :].strip().split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def agrees(text: str, value: float) -> bool:
    """Whether a number is ``value`` rounded to as many places as are shown."""
    shown = text.rstrip("×")
    places = len(shown.partition(".")[2])
    return abs(float(shown) - value) <= 0.5 * 10**-places * 1.001


def step_rows(label: str) -> dict[str, dict[str, Any]]:
    """Rows of results by way, for a table's "8 × BERT-base, batch 16"."""
    width, name = re.match(r"(\d+) × (.*)", label).groups()  # type: ignore[union-attr]
    (workload,) = {key for shown, key in WORKLOADS.items() if name.startswith(shown)}
    measured = [*results("step_h200.json"), *results("sample_h200.json")]
    rows = [row for row in measured if row["workload"] == workload]
    return {row["way"]: row for row in rows if row["width"] == int(width)}


@pytest.mark.parametrize("name", ["mutwo", "zico"])
def test_the_pages_of_the_papers_say_what_the_committed_results_say(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = REPOSITORY / "docs" / f"{name}.md"
    copied = Path(shutil.copy(page, tmp_path / page.name))
    committed = REPOSITORY / "benchmarks" / "results" / f"{name}_h200.json"
    importlib.import_module(f"benchmarks.{name}.page").refresh(json.loads(committed.read_text()), copied)
    assert copied.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")
    drawn, shown = ({each.name for each in (at / name).glob("*.svg")} for at in (tmp_path, page.parent))
    assert drawn == shown != set()


@pytest.mark.parametrize(
    ("after", "column", "unit"),
    [("Milliseconds per member", "median_ms", 1), ("Peak memory", "reserved_bytes", GIB)],
)
def test_the_tables_of_ways_are_those_of_the_results(after: str, column: str, unit: int) -> None:
    num_checked, over = 0, {}
    for row in table("docs/benchmarks.md", after):
        label = row.pop("fleet")
        if label.startswith("geometric mean"):
            for way, shown in row.items():
                assert agrees(shown.split(" ")[0], geometric_mean(over[way])), (label, way)
            continue
        measured = step_rows(label)
        for title, shown in row.items():
            way = title.split(" ")[0]
            found = measured.get(way, {}).get(column)
            if found is not None and label.startswith("8"):
                over.setdefault(way, []).append(found / measured["trainmux"][column])
            if shown in ("", "failed"):
                assert found is None, (label, way)
            else:
                assert agrees(shown, found / unit), (label, way, found / unit)
                num_checked += 1
    assert num_checked >= 30


@pytest.mark.parametrize(
    ("page", "after", "num_rows"),
    [("README.md", "Milliseconds per member and step", 8), ("docs/benchmarks.md", "Three of the twelve", 3)],
)
def test_tables_against_compiled_graphs_are_those_of_the_results(
    page: str, after: str, num_rows: int
) -> None:
    rows = table(page, after)
    assert len(rows) == num_rows
    for row in rows:
        label = row.pop("", "") or row.pop("fleet")
        measured = step_rows(label)
        ours, alone = (measured[way]["median_ms"] for way in ("trainmux", "compiled_graph"))
        for shown, found in zip(row.values(), (ours, alone, alone / ours), strict=True):
            assert agrees(shown, found), (label, shown, found)


@pytest.mark.parametrize(
    ("after", "workload", "batch_size"),
    [("`benchmarks/results/plans_h200", "gpt2_no_dropout", 8), ("The plan with nothing", "resnet101", 48)],
)
def test_the_tables_of_plans_are_those_of_the_results(after: str, workload: str, batch_size: int) -> None:
    units = {"step": ("step_ms", 1), "predicted": ("predicted_ms", 1), "bound": ("bound_ms", 1)}
    units |= {"budget": ("budget_bytes", GIB), "device": ("device_bytes", GIB), "planning": ("planning_s", 1)}
    rows = [row for row in results("plans_h200.json") if row["workload"] == workload]
    num_checked = 0
    for shown in table("docs/planned.md", after):
        share, *cells = shown.values()
        share = share.rstrip(" †").replace(" × ", "")
        name = ("1", "no plan") if share == "no plan" else (share, "auto")
        (measured,) = (
            row for row in rows if (row["share"], row["policy"]) == name and row["batch_size"] == batch_size
        )
        for title, cell in zip(list(shown)[1:], cells, strict=True):
            column, unit = units[title.split(",")[0]]
            if cell:
                assert agrees(cell, measured[column] / unit), (share, title, measured[column] / unit)
                num_checked += 1
    assert num_checked >= 20
