"""``trainmux bench zico``: every way of a pair is measured and written down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from trainmux.cli._app import app
from trainmux.cli.bench.zico import PairResult, WayResult
from trainmux.cli.bench.zico_cases import CifarResNet, zico_case, zico_case_names
from trainmux.cli.bench.zico_run import parse_excesses, parse_pairs, table


def test_a_pair_is_measured_and_written(tmp_path: Path) -> None:
    out = tmp_path / "zico.json"
    words = ["bench", "zico", "--pairs", "small:mlp+small:mlp", "--excesses", "1.01", "--device", "cpu"]
    words += ["--precision", "fp32", "--seconds", "0.05", "--out", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    document = json.loads(out.read_text())
    assert str(tmp_path) not in document["command"]
    assert document["failed"] == []
    (pair,) = document["pairs"]
    assert pair["names"] == ["small:mlp", "small:mlp"]
    ways = {row["way"]: row for row in pair["ways"]}
    assert list(ways) == ["temporal", "co-located, all memory", "co-located, 1.01x", "eager temporal"]
    assert all(row["work"] > 0 for row in ways.values())
    for name in ("co-located, all memory", "co-located, 1.01x"):
        detail = ways[name]["detail"]
        assert detail["smallest_budget_bytes"] <= detail["laid_out_bytes"] <= detail["budget_bytes"]
        assert min(detail["iterations"]) >= 4
    assert ways["co-located, 1.01x"]["detail"]["budget_bytes"] < sum(pair["local_bytes"] + pair["peak_bytes"])
    assert "| small:mlp+small:mlp | 1.00 |" in done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pairs", "bert"], "expected pairs A+B"),
        (["--pairs", "bert+nobody"], "expected names among bert"),
        (["--excesses", "1.5,0.5"], "expected numbers above 1"),
        (["--excesses", "much"], "expected numbers above 1"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["bench", "zico", "--device", "cpu", *words])
    assert done.exit_code == 2
    assert said in " ".join(done.output.replace("│", " ").split())


def test_names() -> None:
    assert parse_pairs("bert+gnmt, mlp+mlp") == [("bert", "gnmt"), ("mlp", "mlp")]
    assert parse_excesses("1.3,2") == [1.3, 2.0]
    for name in zico_case_names():
        assert zico_case(name).note
    batch = zico_case("gnmt").batch(0)
    assert (batch["source"].shape, batch["target"].shape) == ((256, 16), (256, 17))


def test_the_cifar_network_has_the_layers_that_its_name_says() -> None:
    layers = [m for m in CifarResNet().modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    assert len(layers) - 2 == 110  # and two 1x1 convolutions beside the stages' first blocks
    assert CifarResNet(num_blocks=1)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_resnet_50_is_the_published_one() -> None:
    with torch.device("meta"):
        model = zico_case("resnet50").build(0)
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032


def test_a_table_is_relative_to_turns() -> None:
    rows = (WayResult("temporal", (1.0, 1.0), 0.9), WayResult("other", (2.0, 2.0), 1.35))
    lines = table([PairResult(("a", "b"), (1.0, 2.0), (1, 2), (3, 4), rows)])
    assert lines[0] == "| pair | temporal | other |"
    assert lines[2] == "| a+b | 1.00 | 1.50 |"
