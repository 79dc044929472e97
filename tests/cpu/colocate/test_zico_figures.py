"""The figures of Zico from results: what was measured is shown, the rest is left out with the reason."""

from __future__ import annotations

import copy
import json
import os
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from benchmarks.bench.zico_draw import Bar, Curve, Mark, bars, curves, stacked
from benchmarks.bench.zico_figures import figures
from benchmarks.bench.zico_memory import quantiles, thinned
from benchmarks.bench.zico_merge import merge
from benchmarks.bench.zico_page import write_page
from benchmarks.bench.zico_results import Figure, Results
from typer.testing import CliRunner

from trainmux.cli._app import app

MIB = 1 << 20


@pytest.fixture(scope="module")
def memory_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a run that looked at memory alone, as on a machine without a GPU; one worker makes it for all."""
    folder = tmp_path_factory.mktemp("zico")
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = tmp_path_factory.getbasetemp().parent
    done = folder / "zico_done.json"
    try:
        (folder / "zico_begun").touch(exist_ok=False)
    except FileExistsError:
        while not done.exists():  # as long as a test may take
            time.sleep(0.2)
    else:
        os.replace(make_memory_results(folder / "zico.json"), done)
    document: dict[str, Any] = json.loads(done.read_text())
    return document


def make_memory_results(out: Path) -> Path:
    words = ["bench", "zico", "--pairs", "small:nasnet+small:resnet110,small:resnet110+small:resnet110"]
    words += ["--excesses", "1.3", "--parts", "memory,host_view", "--device", "cpu", "--precision", "fp32"]
    done = CliRunner().invoke(app, [*words, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text())["failed"] == []
    return out


def by_name(document: dict[str, Any]) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures(Results(document))}


def way(name: str, work: float, rates: tuple[float, float] = (10.0, 5.0), **detail: Any) -> dict[str, Any]:
    return {"way": name, "iterations_per_second": list(rates), "work": work, "detail": detail}


def colocated(name: str, work: float, budget: int, least: int = 60 * MIB, **more: Any) -> dict[str, Any]:
    return way(
        name,
        work,
        budget_bytes=budget,
        smallest_budget_bytes=least,
        device_bytes=budget - MIB,
        iterations=[12, 4],
        shift_seconds=[0.012, 0.0],
        samples=[[0.0, 30.0 * MIB, 20.0 * MIB], [0.01, 10.0 * MIB, 40.0 * MIB], [0.02, 0.0, 0.0]],
        **more,
    )


@pytest.fixture
def gpu_results(memory_results: dict[str, Any]) -> dict[str, Any]:
    """As a GPU could have given them; the numbers are made up."""
    document = copy.deepcopy(memory_results)
    document["environment"]["device"] = "some GPU"
    change = {"in_force_after_seconds": 0.002, "longest_gap_seconds": [0.03, 0.004]}
    ways = [
        way("temporal", 0.9),
        way("two streams, unlimited", 1.35),
        colocated("co-located, 1.3x", 1.2, 90 * MIB),
        colocated("co-located, 1.8x", 1.08, 70 * MIB, least=70 * MIB),
        colocated("co-located, 70%", 1.2, 84 * MIB, change=None),
        colocated("co-located, 50%", 1.0, 60 * MIB, change=change),
        colocated("co-located, 70% again", 1.2, 84 * MIB, change=change),
        way("MPS, eager", 0.72),
    ]
    names = ["nasnet", "resnet110"]
    sizes = {"solo_ms": [30.0, 10.0], "local_bytes": [10 * MIB] * 2, "peak_bytes": [50 * MIB] * 2}
    document["pairs"] = [
        {"names": names, **sizes, "ways": ways},
        {"names": ["gnmt", "gnmt"], **sizes, "ways": ways[:4]},
    ]
    document["tracking"] = {"gnmt": {"All": 0.5, "Fine-grained": 0.9}}
    document["regions"] = {"gnmt": {"64 MB": 1.2, "Small region": 1.14}}
    document["host_view"] = {
        "resnet50": {"samples": [[0.0, 5.0 * MIB], [0.02, 9.0 * MIB]], "issued": [0.01], "ended": [0.04]}
    }
    document["failed"] = [{"names": names, "way": "MPS, graphs", "error": "BenchError: no <MPS>"}]
    document["left_out"] = ["bert+bert"]
    return document


def test_memory_alone_gives_the_figures_of_memory(memory_results: dict[str, Any]) -> None:
    found = by_name(memory_results)
    shown = [name for name, figure in found.items() if not figure.left_out]
    assert shown == ["Figure 1", "Figure 2", "Figure 6", "Figure 7", "Figure 9", "Figure 10", "§7.4"]
    assert all(found[name].produced_on for name in shown)
    for name, figure in found.items():
        if name not in shown:
            assert "measured in this run" in figure.left_out
            assert not figure.pictures
            assert not figure.table
    assert "worked out for an H200" in found["Figure 1"].produced_on
    assert "scaled" not in found["Figure 1"].produced_on
    assert "prior of 1.18" in found["Figure 9"].produced_on


def test_feature_maps_and_the_rest_are_told_apart(memory_results: dict[str, Any]) -> None:
    record = memory_results["memory"]["small:nasnet"]
    kept, rest = record["lifespans"]["feature maps"], record["lifespans"]["others"]
    assert kept["mean_seconds"] > 2 * rest["mean_seconds"] > 0
    assert kept["quantiles_seconds"] == sorted(kept["quantiles_seconds"])
    assert len(kept["quantiles_seconds"]) == 101
    assert 0 < record["lowest_bytes"] < record["peak_bytes"]
    assert max(size for _, size in record["curve"]) == record["peak_bytes"]
    rows = by_name(memory_results)["Figure 1"].table
    assert [row[0] for row in rows[1:]] == ["feature maps", "others"]
    assert rows[1][1] == str(kept["count"])


def test_simulated_pairs_keep_to_their_budgets(memory_results: dict[str, Any]) -> None:
    for pair in memory_results["simulated"]:
        assert list(pair["runs"]) == ["co-located, all memory", "co-located, 1.3x"]
        roomy, tight = pair["runs"].values()
        assert tight["budget_bytes"] < roomy["budget_bytes"] == pair["whole_bytes"]
        assert roomy["shift_seconds"] == [0, 0]
        assert tight["work"] <= roomy["work"]
        for run in (roomy, tight):
            assert 0 < run["most_bytes"] <= run["budget_bytes"]
        high, low, again = pair["change"]["phases"]
        assert high["budget_bytes"] == again["budget_bytes"] > low["budget_bytes"]
        for phase in (high, low, again):
            assert 0 < phase["most_bytes"] <= phase["budget_bytes"]
            assert sum(phase["iterations_per_second"]) > 0
    unequal = memory_results["simulated"][0]["runs"]["co-located, 1.3x"]["iterations"]
    assert unequal[0] != unequal[1]


def test_pairs_stand_beside_the_papers_claims(gpu_results: dict[str, Any]) -> None:
    found = by_name(gpu_results)
    assert not [name for name, figure in found.items() if figure.left_out]
    headings, row = found["Figure 8"].table
    cells = dict(zip(headings, row, strict=True))
    assert cells["co-located, 1.3x"] == "1.33"
    assert cells["two streams, unlimited"] == "1.50"
    assert cells["MPS, eager"] == "0.80"
    assert cells["part of the unlimited gain kept"] == "0.67, 0.40"
    assert cells["paper"] == "1.15"
    assert "Not measured in this run: rhn+gnmt, nasnet+gnmt, bert+gnmt." in found["Figure 8"].notes
    assert "MPS, graphs: BenchError: no <MPS>" in found["Figure 8"].notes
    raised = [note for note in found["Figure 8"].notes if "the smallest budget" in note]
    assert len(raised) == 1
    assert raised[0].startswith("nasnet+resnet110, 1.8x: ")
    assert "exceed 1.71 times" in raised[0]
    assert found["Figure 5"].table[1][-1] == "1.37 on average"
    nine = [row for row in found["Figure 9"].table if row[1] == "some GPU"]
    assert [row[2] for row in nine] == ["1.3x", "1.8x"]
    assert nine[0][4:] == ("12 : 4", "1 and 0", "89")
    ten = [row for row in found["Figure 10"].table if "measured" in row[0]]
    assert [row[1:4] for row in ten] == [
        ("70%", "70%", "84"),
        ("50%", "50%", "60"),
        ("70% again", "70%", "84"),
    ]
    assert [row[6:] for row in ten] == [("", ""), ("2", "30"), ("2", "30")]
    assert found["Table 1"].table[1] == ("All (paper)", "50% (44%)")
    assert found["Table 1"].table[3] == ("Coarse-grained (paper)", "– (97%)")
    assert found["Table 2"].table[1:] == [
        ("Small region (paper)", "95% (97%)"),
        ("Tensor (paper)", "– (90%)"),
    ]
    assert found["Figure 3"].table[1] == ("1", "10", "40", "75%")


def test_pairs_with_other_budgets_and_ways_share_a_table(gpu_results: dict[str, Any]) -> None:
    """Budgets stand in their order, whichever pair has them, and what nobody measured is said of whom."""
    first = gpu_results["pairs"][0]
    others = [
        colocated("co-located, 1.3x", 1.2, 90 * MIB),
        colocated("co-located, 1.5x", 1.1, 80 * MIB),
        colocated("co-located, 11 GiB", 1.1, 11 << 30),
        colocated("co-located, 1.8x", 1.0, 70 * MIB),
    ]
    gpu_results["pairs"].append({**first, "names": ["rhn", "gnmt"], "ways": [way("temporal", 1.0), *others]})
    gpu_results["failed"] = []
    figures = by_name(gpu_results)
    tight = [heading for heading in figures["Figure 8"].table[0] if heading.startswith("co-located")]
    assert tight == [f"co-located, {budget}" for budget in ("1.3x", "1.5x", "1.8x", "11 GiB")]
    said = "Two processes and MPS were not measured for these pairs (`--processes`)."
    assert said in figures["Figure 5"].notes
    assert said not in figures["Figure 8"].notes


def test_a_page_has_every_figure_and_its_pictures(gpu_results: dict[str, Any], tmp_path: Path) -> None:
    written = write_page(gpu_results, tmp_path / "figures.md")
    text = written[0].read_text(encoding="utf-8")
    for number in ("1", "2", "3", "5", "6", "7", "8", "9", "10"):
        assert f"\n## Figure {number}: " in text
    assert text.count("Produced on: ") == 12
    assert "## What failed\n\n- nasnet+resnet110, MPS, graphs: BenchError: no &lt;MPS>" in text
    assert "## What the limit of time left out\n\n- bert+bert" in text
    pictures = written[1:]
    assert len(pictures) >= 10
    for picture in pictures:
        assert f"](figures/{picture.name})" in text
        ElementTree.parse(picture)


def test_the_command_draws_a_file_without_measuring(gpu_results: dict[str, Any], tmp_path: Path) -> None:
    out, page = tmp_path / "zico.json", tmp_path / "page.md"
    out.write_text(json.dumps(gpu_results))
    words = ["bench", "zico", "--read", str(out), "--device", "cpu", "--figures", str(page)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "Produced on: some GPU" in page.read_text(encoding="utf-8")
    assert json.loads(out.read_text()) == gpu_results


def test_files_of_several_runs_are_one_page(gpu_results: dict[str, Any], tmp_path: Path) -> None:
    """What the last run has is taken, but for pairs that it has only begun."""
    later = copy.deepcopy(gpu_results)
    later |= {"command": "the second", "date": "tomorrow", "seconds": 5.0, "left_out": [], "failed": []}
    later["cases"], later["memory"], later["simulated"] = {"rhn": "another"}, {}, []
    both, begun = ["rhn", "rhn"], list(gpu_results["pairs"][0]["names"])
    sizes = {"solo_ms": [1.0, 1.0], "local_bytes": [1, 1], "peak_bytes": [2, 2]}
    later["pairs"] = [
        {
            "names": ["bert", "bert"],
            **sizes,
            "ways": [way("temporal", 1.0), way("co-located, all memory", 1.1)],
        },
        {"names": begun, **sizes, "ways": [way("temporal", 1.0)]},
        {"names": both, **sizes, "ways": [way("temporal", 1.0)]},
    ]
    merged = merge([gpu_results, later])
    pairs = {tuple(pair["names"]): pair for pair in merged["pairs"]}
    assert pairs[tuple(begun)] == gpu_results["pairs"][0]
    assert pairs["rhn", "rhn"] == later["pairs"][2]  # nobody else has it
    assert pairs["bert", "bert"] == later["pairs"][0]
    assert merged["left_out"] == []  # it was left out in the first run alone
    names = list(gpu_results["memory"])[:1]
    lost = {
        "failed": [
            {"names": ["bert"], "way": "build", "error": "mended"},
            {"names": names, "way": "memory", "error": "mended"},
            {"names": names, "way": "host_view", "error": "holds"},
            {"names": ["bert", "bert"], "way": "co-located", "error": "mended"},
            {"names": ["bert", "bert"], "way": "MPS, graphs", "error": "holds"},
        ],
        "left_out": [
            "bert+bert",
            "bert+bert, temporal",
            "bert+bert, memory",
            f"{names[0]}, tracking",
            f"{names[0]}, host view",
            "rhn+rhn",
        ],
    }
    seen = merge(
        [{**gpu_results, **lost}, {**later, "host_view": {names[0]: {"samples": []}}, "tracking": {}}]
    )
    assert [row["way"] for row in seen["failed"]] == ["MPS, graphs"]
    assert f"{names[0]}, host view" not in seen["left_out"]
    told = merge(
        [{**gpu_results, **lost, "host_view": {}, "tracking": {}}, {**later, "host_view": {}, "tracking": {}}]
    )
    assert [row["error"] for row in told["failed"]] == ["holds", "holds"]
    missing = [f"{names[0]}, {part}" for part in ("tracking", "host view")]
    assert told["left_out"] == ["bert+bert, memory", *missing, "rhn+rhn"]
    assert merged["failed"] == gpu_results["failed"]
    assert merged["memory"] == gpu_results["memory"]
    assert merged["cases"] == {**gpu_results["cases"], "rhn": "another"}
    assert merged["date"] == f"{gpu_results['date']} to tomorrow"
    assert merge([later, gpu_results])["date"] == merged["date"]
    assert merged["seconds"] == gpu_results["seconds"] + 5.0
    text = write_page(merged, tmp_path / "page.md")[0].read_text(encoding="utf-8")
    assert f"{gpu_results['command']}\nthe second" in text
    elsewhere = {**later, "environment": {**later["environment"], "device": "another GPU"}}
    with pytest.raises(ValueError, match="expected results of one device, got some of some GPU"):
        merge([gpu_results, elsewhere])
    otherwise = {**later, "settings": {**later["settings"], "precision": "fp64"}}
    with pytest.raises(ValueError, match="expected results of one precision"):
        merge([gpu_results, otherwise])


def test_a_failed_part_is_left_out_with_its_error(memory_results: dict[str, Any]) -> None:
    document = copy.deepcopy(memory_results)
    document["failed"] = [{"names": ["resnet50"], "way": "host_view", "error": "BenchError: no device"}]
    assert by_name(document)["Figure 3"].left_out == "the host's view failed: BenchError: no device"


def test_curves_are_thinned_to_their_highest_points() -> None:
    curve = [(float(place), place % 7) for place in range(3001)]
    few = thinned(curve, 3000.0)
    assert len(few) <= 400
    assert {size for _, size in few[:-1]} == {6}
    assert few[-1] == [3000.0, 3000 % 7]
    assert thinned(curve[:10], 9.0) == [[moment, size] for moment, size in curve[:10]]
    assert quantiles([], 4) == []
    assert quantiles([1.0, 2.0, 3.0, 4.0, 5.0], 4) == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_pictures_show_what_they_are_given() -> None:
    drawn = bars("t", [("a", [Bar("x", 2.0), Bar("y", None, "<none>"), Bar("z", 1.0, is_over=True)])])
    assert "#b00000" in drawn
    assert "&lt;none&gt;" in drawn
    for picture in (
        drawn,
        bars("empty", [], mark=Mark("one", 1.0)),
        curves("t", "x", "y", [Curve("a", [(0, 0), (1, 5000)], is_stepped=True)], [Mark("m", 0.5, True)]),
        curves("empty", "x", "y", []),
        stacked("t", "x", "y", ["a", "b"], [(0, 1, 2), (1, 0, 3)], [Mark("budget", 4)]),
        stacked("empty", "x", "y", ["a"], []),
    ):
        ElementTree.fromstring(picture)
    assert "5,000" in curves("t", "x", "y", [Curve("a", [(0, 0), (1, 5000)])])
