"""What is done with records: statistics, merging, tables, the page and the chart."""

from __future__ import annotations

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from bench_records import DEVICE, record
from benchmarks.bench import svg, tables, timing
from benchmarks.bench.job import BenchError
from benchmarks.bench.markdown import page
from benchmarks.bench.record import merge, read_records, write_records
from typer.testing import CliRunner

from trainmux.cli._app import app

CPU = torch.device("cpu")


def test_times_are_summarized_per_member() -> None:
    blocks = timing.Blocks((0.010, 0.008, 0.030, 0.012, 0.006), steps_per_block=9, num_warmup_steps=4)
    found = timing.summarize(blocks, 2, build_s=1.0, start_to_first_step_s=2.0)
    assert found.block_ms == pytest.approx((5, 4, 15, 6, 3))
    assert (found.median_ms, found.min_ms, found.max_ms) == pytest.approx((5, 3, 15))
    assert (found.lower_quartile_ms, found.upper_quartile_ms) == pytest.approx((4, 6))
    assert timing.quartiles([2.0]) == (2.0, 2.0)


def test_blocks_rotate_over_the_batches_and_have_the_length_asked_for() -> None:
    seen: list[int] = []
    blocks = timing.time_blocks(seen.append, range(4), CPU, num_blocks=3, block_seconds=1e-3)
    assert len(blocks.step_seconds) == 3
    assert len(seen) == blocks.num_warmup_steps + 3 * blocks.steps_per_block
    assert seen == [index % 4 for index in range(len(seen))]


def test_warming_up_goes_on_until_steps_take_the_same_time() -> None:
    assert not timing._has_settled([1.0, 1.0])
    assert not timing._has_settled([9.0, 5.0, 1.0])
    assert timing._has_settled([9.0, 5.0, 1.0, 1.1])
    assert timing._has_settled([1.0, 9.0] * 10)


def test_a_geometric_mean_counts_what_is_there() -> None:
    mean, count = tables.mean_ratio([2.0, None, 8.0])
    assert (mean, count) == (pytest.approx(4.0), 2)
    assert tables.mean_ratio([None]) == (None, 0)


def test_numbers_keep_three_digits() -> None:
    shown = [tables.number(value) for value in (0.01234, 1.5, 12.34, 999.6, 12345.0)]
    assert shown == ["0.0123", "1.5", "12.3", "1000", "12345"]


def test_later_records_of_the_same_key_win() -> None:
    first = [record("eager", [0.1]), record("trainmux", [0.1]), record("eager", [0.3], width=4)]
    second = [record("eager", None), record("eager", [0.2], device="another")]
    merged = merge([first, second])
    assert len(merged) == 4
    assert [found.median_ms for found in merged] == [None, pytest.approx(50), pytest.approx(75), 100]


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    records = [record("eager", [0.1, 0.2]), record("mps", None)]
    path = tmp_path / "new" / "runs.json"
    write_records(path, records)
    back = read_records(path)
    assert back == records
    assert [found.name for found in path.parent.iterdir()] == ["runs.json"]


@pytest.mark.parametrize("text", ["", "{}]", "[1]", "{}x", '[{"format": 99}]', '[{"way": "eager"}]'])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BenchError, match=r"bench step.*other\.json"):
        read_records(path)


def test_speedups_are_of_trainmux_against_each_other_way() -> None:
    records = [
        record("trainmux", [0.1]),
        record("eager", [0.4]),
        record("mps", None),
        record("trainmux", [0.1], workload="gpt2"),
        record("eager", [0.9], workload="gpt2"),
    ]
    comparison = tables.compare(records)
    assert comparison.ways == ("eager", "mps", "trainmux")
    grid = tables.speedups(comparison, "trainmux")
    assert grid.headings == ("workload", "eager", "mps")
    assert grid.rows == (
        ("vit_b16 (batch 32, width 2)", "4.00×", "–"),
        ("gpt2 (batch 32, width 2)", "9.00×", "–"),
        ("geometric mean, width 2 (of how many)", "6.00× (2)", "–"),
    )
    assert tables.times(comparison).rows[0] == (
        "vit_b16 (batch 32, width 2)",
        "200 (200–200)",
        "failed",
        "50 (50–50)",
    )


def test_variants_are_compared_too_unless_they_have_no_times() -> None:
    comparison = tables.compare(
        [record("trainmux:b", None), record("trainmux:a", [0.2]), record("eager", [0.4])]
    )
    grids = tables.times_and_speedups(comparison)
    assert [grid.title for grid in grids[1:]] == ["How many times faster trainmux:a is than each"]


def test_the_page_tells_how_with_what_and_what_failed() -> None:
    text = page(
        [record("eager", [0.4, 0.5, 0.6]), record("mps", None), record("trainmux:a", [0.1])],
        "trainmux bench report x.json",
        "plots/x.svg",
    )
    assert "Generated" in text
    assert "trainmux bench report x.json" in text
    assert "![Speed of each way, by workload](plots/x.svg)" in text
    assert "250 (200–300)" in text
    assert "torch 2.11.0+cu130, CUDA 13.0, driver 580.159.04, Python 3.12.3" in text
    assert "cuDNN" not in text
    assert "2026-11-15T07:00:00+00:00" in text
    assert "commit 0123456789ab with changes" in text
    assert "failed: OutOfMemoryError: too &lt;big> \\| far" in text
    assert "`trainmux:a`: with `Fleet(..., **{'engine': 'reference'})`" in text
    assert "1,234 parameters" in text
    assert "done differently: vit\\_b16" in text
    assert "runs node by node" in text
    assert "of no interest" not in text


def svg_texts(text: str) -> list[str]:
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    height = float(root.attrib["height"])
    for element in root.iter():
        for name in ("x", "y", "x1", "x2", "y1", "y2", "width", "height"):
            assert math.isfinite(float(element.attrib.get(name, 0)))
        assert float(element.attrib.get("y", 0)) <= height
    return [element.text or "" for element in root.iter() if element.tag.endswith("text")]


def test_the_chart_shows_speeds_relative_to_the_first_way() -> None:
    texts = svg_texts(
        svg.chart(
            [
                record("eager", [0.4]),
                record("trainmux", [0.1]),
                record("mps", None),
                record("trainmux:<b>", [0.8]),
                record("trainmux", [0.1], workload="gpt2"),
                record("eager", None, workload="dlrm"),
            ]
        )
    )
    # trainmux has most times here, so that it is what the others are relative to.
    assert f"{DEVICE}: steps per second, relative to trainmux" in texts
    assert {"1× = 50 ms", "0.25×", "0.125×", "failed", "trainmux:<b>", "1/8×"} <= set(texts)
    assert any("without dlrm" in text for text in texts)


def test_a_chart_without_any_time_says_so() -> None:
    assert svg_texts(svg.chart([record("eager", None)])) == [f"{DEVICE}: no times to show"]


def test_the_report_is_the_same_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_records(Path("a.json"), [record("eager", [0.4]), record("trainmux", [0.4])])
    write_records(Path("b.json"), [record("trainmux", [0.1])])
    arguments = ["bench", "report", "a.json", "b.json", "--markdown", "docs/page.md", "--plot", "plots/p.svg"]
    made = []
    for _ in range(2):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        assert "4.00×" in result.output
        made.append([Path("docs/page.md").read_bytes(), Path("plots/p.svg").read_bytes()])
    assert made[0] == made[1]
    text = made[0][0].decode()
    assert " ".join(["trainmux", *arguments]) in text
    assert "](../plots/p.svg)" in text


def test_a_report_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"no": "records"}), encoding="utf-8")
    for wrong in (path, tmp_path / "missing.json"):
        assert CliRunner().invoke(app, ["bench", "report", str(wrong)]).exit_code == 2
