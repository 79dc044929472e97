"""``python -m benchmarks zico``: what a run records, and what is drawn from it."""

from __future__ import annotations

import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import trainmux as tm

pytest.importorskip("matplotlib", reason="needs the extra of the benchmarks")
pytest.importorskip("pandas", reason="needs the extra of the benchmarks")

from benchmarks.zico import cases, colocated, pair, results, run
from benchmarks.zico.command import app
from benchmarks.zico.figures import FIGURES
from benchmarks.zico.jobs import BenchJob, ZicoOptions
from benchmarks.zico.page import refresh

REPOSITORY = Path(__file__).parents[2]
COMMITTED = REPOSITORY / "benchmarks" / "results" / "zico_h200.json"
OPTIONS = ZicoOptions("cpu", "aten", "fp32", 0.05)
PAIR = "small:mlp+small:mlp"


@pytest.fixture
def few_iterations(monkeypatch: pytest.MonkeyPatch, built_once: None) -> None:
    """Count iterations, rather than time them."""
    monkeypatch.setattr(colocated, "_LEAST_COUNTED", 4)


def invoke(out: Path, *words: str) -> Any:
    fixed = ["--device", "cpu", "--precision", "fp32", "--seconds", "0.05", "--out", str(out)]
    return CliRunner().invoke(app, [*fixed, "--pairs", PAIR, *words])


@pytest.mark.usefixtures("few_iterations")
def test_a_pair_is_measured_recorded_and_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair, "CHANGING", (("mlp", "mlp"),))
    monkeypatch.setattr(pair, "SAMPLED", (("mlp", "mlp"),))
    out = tmp_path / "zico.json"
    done = invoke(out, "--excesses", "1.01")
    assert done.exit_code == 0, done.output
    assert PAIR in done.output.splitlines()[-1]
    document = results.read(out)
    (record,) = document["pairs"]
    assert record["names"] == PAIR.split("+")
    assert record["is_complete"]
    assert record["failed"] == {}
    ways = {row["way"]: row for row in record["ways"]}
    in_budgets = [colocated.ALL_MEMORY, "co-located, 1.01x", *colocated.CHANGES]
    assert list(ways) == [pair.TEMPORAL, *in_budgets, pair.EAGER_TEMPORAL]
    assert all(rate > 0 for row in ways.values() for rate in row["iterations_per_second"])
    whole = sum(record["local_bytes"] + record["peak_bytes"])
    for way in in_budgets:
        assert ways[way]["smallest_budget_bytes"] <= ways[way]["budget_bytes"] <= whole
        for _, *held in ways[way].get("samples", []):
            assert sum(held) <= ways[way]["budget_bytes"]
    high, low, again = (ways[way] for way in colocated.CHANGES)
    assert high["budget_bytes"] == again["budget_bytes"] > low["budget_bytes"]
    assert low["change"]["in_force_after_seconds"] > 0
    memory = document["memory"]["small:mlp"]
    assert memory["seconds"] == pytest.approx(record["solo_ms"][1] / 1e3)
    assert 0 < memory["lowest_bytes"] < memory["peak_bytes"] == max(size for _, size in memory["curve"])
    maps, others = memory["lifespans"].values()
    assert maps["mean_seconds"] > others["mean_seconds"] > 0
    (measured,) = document["runs"]
    assert measured["environment"]["torch"] == torch.__version__
    assert measured["settings"]["seconds"] == 0.05

    monkeypatch.setattr(run, "BenchJob", None)  # nothing is left to build
    assert invoke(out, "--excesses", "1.01", "--resume").exit_code == 0
    assert results.read(out)["pairs"] == document["pairs"]


@pytest.mark.extensive
@pytest.mark.usefixtures("few_iterations")
def test_a_failing_way_is_recorded_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, seen = tm.Colocation.set_budget, []

    def fail_second(colocation: tm.Colocation, budget: int) -> None:
        seen.append(budget)
        if len(seen) == 2:
            raise RuntimeError("the device is busy")
        change(colocation, budget)

    monkeypatch.setattr(tm.Colocation, "set_budget", fail_second)
    out = tmp_path / "zico.json"
    assert invoke(out, "--excesses", "1.01,1.02", "--parts", "pairs").exit_code == 0
    (record,) = results.read(out)["pairs"]
    assert record["failed"] == {"co-located": "RuntimeError: the device is busy"}
    ways = [row["way"] for row in record["ways"]]
    assert ways == [pair.TEMPORAL, colocated.ALL_MEMORY, pair.EAGER_TEMPORAL]


def test_nothing_is_started_when_time_is_over(tmp_path: Path) -> None:
    done = invoke(tmp_path / "zico.json", "--time-limit", "0")
    assert done.exit_code == 0
    assert f"{PAIR}: left out" in done.output
    assert not (tmp_path / "zico.json").exists()


@pytest.mark.extensive
def test_two_processes_train_at_once_and_tell_what_went_wrong() -> None:
    options = ZicoOptions("cpu", "aten", "fp7", 0.05)  # plain torch does not look at it, a fleet does
    jobs = (BenchJob("small:mlp", 0, options), BenchJob("small:rhn", 0, options))
    found = pair.PairBench(jobs, options).in_processes("two processes")
    record = next(found)
    assert record["way"] == "two processes, eager"
    assert min(record["iterations_per_second"]) > 0
    with pytest.raises(tm.ConfigError, match="fp7"):
        next(found)


def test_wrong_options_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    wrong = ["--pairs bert", "--pairs bert+nobody", "--pairs bert@0+gnmt", "--excesses 1.5,0.5"]
    for words in (*wrong, "--excesses much", "--parts pairs,pictures", "--read none.json"):
        assert invoke(tmp_path / "zico.json", *words.split()).exit_code == 2, words
    assert list(tmp_path.iterdir()) == []


def test_the_committed_results_fill_the_page_and_draw_every_figure(tmp_path: Path) -> None:
    document = results.read(COMMITTED)
    records = [*document["pairs"], *document["memory"].values()]
    assert {row["run"] for row in records} == set(range(len(document["runs"])))
    for row in document["runs"]:
        assert row["command"]
        assert row["date"]
        assert row["environment"]["torch"]
    page = REPOSITORY / "docs" / "zico.md"
    copied = Path(shutil.copy(page, tmp_path / "zico.md"))
    _, *drawn = refresh(document, copied)
    assert copied.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")
    assert [path.stem for path in drawn] == list(FIGURES)
    for path in drawn:
        ElementTree.parse(path)
        assert f"](zico/{path.name})" in page.read_text(encoding="utf-8")
    assert refresh(results.empty(), copied) == [copied]  # nothing to draw from
    assert copied.read_text(encoding="utf-8").count("\nNot measured.\n") == 6
    copied.write_text("<!-- zico: nothing -->\n<!-- end -->\n", encoding="utf-8")
    with pytest.raises(ValueError, match="expected a part among"):
        refresh(document, copied)


def test_budgets_never_fall_below_the_smallest_that_can_work() -> None:
    def sizes(smallest: int) -> list[int]:
        phases = colocated.budget_phases(100, smallest, (1.3, 1.8), samples=False, changes=True)
        return [phase.budget_bytes for phase in phases]

    assert sizes(40) == [100, 76, 55, 70, 50, 70]
    assert sizes(80) == [100, 80, 80, 90, 80, 90]


def test_the_six_models_have_their_sizes_and_make_21_pairs_with_those_of_figure_8_first() -> None:
    pairs = cases.parse_pairs("all")
    assert len({frozenset(names) for names in pairs}) == len(pairs) == 21
    assert pairs[:4] == list(cases.FIGURE_8)
    assert {name for names in pairs for name in names} == set(cases.MODELS)
    larger = cases.find_zico_case("rhn@7")
    assert larger.batch(0)[0].shape == (7, 8)
    assert "7 rows" in larger.note
    layers = [m for m in cases.CifarResNet().modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    assert len(layers) - 2 == 110  # besides two 1x1 convolutions on shortcuts
    batch = cases.find_zico_case("gnmt").batch(0)
    assert (batch["source"].shape, batch["target"].shape) == ((256, 16), (256, 17))


@pytest.mark.usefixtures("built_once")
def test_a_model_trains_alike_fused_and_in_plain_torch() -> None:
    job = BenchJob("small:rhn", 0, OPTIONS)
    model = job.case.build(0).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for batch in job.batches:
        optimizer.zero_grad()
        loss = job.case.loss(model, batch)
        loss.backward()
        optimizer.step()
        assert job.fleet.step(batch).item() == pytest.approx(loss.item(), rel=1e-4)
