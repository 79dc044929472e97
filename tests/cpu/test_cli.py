"""The command line: what it prints, refuses and saves."""

from __future__ import annotations

import builtins
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import sleep

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from typer.testing import CliRunner

from trainmux.cli import _digits, _sweep, demo
from trainmux.cli import main as entry
from trainmux.cli._app import app
from trainmux.errors import MemberError


def row(setting: _sweep.Setting, accuracy: float, loss: float = 0.5) -> demo.Row:
    return demo.Row(setting, _sweep.Score(loss, accuracy), _sweep.Score(0.25, 0.75))


def test_version_names_trainmux_and_torch() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert "trainmux 0" in result.output
    assert "torch 2" in result.output


def test_python_m_trainmux_is_the_command_line() -> None:
    command = [sys.executable, "-m", "trainmux", "demo", "--help"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "--epochs" in result.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU where there is none")
def test_a_missing_gpu_is_refused() -> None:
    result = CliRunner().invoke(app, ["demo", "--device", "cuda"], terminal_width=200)
    assert result.exit_code == 2
    assert "no CUDA device" in result.output


@pytest.mark.parametrize("arguments", [["--device", "tpu"], ["--epochs", "0"]])
def test_bad_options_are_refused(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, ["demo", *arguments]).exit_code == 2


@pytest.mark.parametrize("missing", ["typer", "sklearn", "rich"])
def test_a_missing_package_names_the_extra(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import: Callable[..., object] = builtins.__import__

    def without(name: str, *rest: object, **options: object) -> object:
        if name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        return real_import(name, *rest, **options)

    for module in [name for name in sys.modules if name.startswith("trainmux.cli.")]:
        if module != "trainmux.cli.main":
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.setattr(sys, "argv", ["trainmux", "demo", "--epochs", "1"])
    with pytest.raises(SystemExit, match=r"trainmux\[cli\]") as stop:
        entry.main()
    assert missing in str(stop.value)


def test_other_missing_packages_are_not_blamed_on_the_extra() -> None:
    assert entry.missing_extra(ModuleNotFoundError("No module named 'torch'", name="torch")) is None


def test_a_typed_error_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: object) -> None:
        raise MemberError("expected at least one member, got none; add one")

    monkeypatch.setattr(demo, "run_demo", refuse)
    monkeypatch.setattr(sys, "argv", ["trainmux", "demo"])
    with pytest.raises(SystemExit, match="expected at least one member"):
        entry.main()


def test_digits_are_split_once_and_for_all() -> None:
    data, again = _digits.load(), _digits.load()
    assert (len(data.train), len(data.validation)) == (1437, 360)
    images, labels = data.train.tensors
    assert images.shape == (1437, 1, 8, 8)
    assert (images.min(), images.max()) == (0, 1)
    assert labels.unique().tolist() == list(range(10))
    assert torch.equal(images, again.train.tensors[0])


def test_loaders_with_the_same_seed_give_the_same_batches() -> None:
    data = _digits.load()
    first, second = (_digits.train_loader(data, 64, seed=3) for _ in range(2))
    for _ in range(2):  # epochs: the order changes, for both alike
        pairs = list(zip(first, second, strict=True))
        assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in pairs)
    assert len(pairs) == len(first) == 23
    assert sum(len(batch[1]) for batch, _ in pairs) == len(data.train)
    images, labels = pairs[0][0]
    assert images.shape == (64, 1, 8, 8)
    assert labels.shape == (64,)
    assert len(list(_digits.validation_loader(data))) == 1


def test_clocked_loader_counts_the_first_batch_of_each_size() -> None:
    loader = DataLoader(torch.utils.data.TensorDataset(torch.zeros(7), torch.zeros(7)), batch_size=2)
    clocked = _digits.ClockedLoader(loader)
    assert len(clocked) == 4
    for epoch in range(2):
        for index, _ in enumerate(clocked):
            sleep(0.05 if epoch == 0 and index in (0, 3) else 0.001)
    assert 0.09 <= clocked.first_use_seconds < 0.2


def test_the_sweep_has_sixteen_distinct_members() -> None:
    settings = _sweep.settings()
    assert len({setting.name for setting in settings}) == len(settings) == 16


def test_one_member_alone_learns() -> None:
    data = _digits.load()
    setting = _sweep.Setting(lr=1e-2, weight_decay=1e-4, seed=0)
    device = torch.device("cpu")
    first, second = (_sweep.train_alone(setting, data, device, epochs=3) for _ in range(2))
    assert first == second
    assert first.accuracy > 0.5
    assert first.loss < math.log(10)


def test_members_are_ranked_by_accuracy_then_loss_and_broken_ones_come_last() -> None:
    first, second, third, fourth = _sweep.settings()[:4]
    rows = [row(first, 0.9, math.nan), row(second, 0.8, 0.2), row(third, 0.8, 0.1), row(fourth, 0.85)]
    assert [placed.setting for placed in demo.ranked(rows)] == [fourth, third, second, first]


def test_the_table_shows_every_member_in_order() -> None:
    settings = _sweep.settings()
    rows = [row(setting, index / 100) for index, setting in enumerate(settings)]
    table = demo.results_table(rows)
    assert table.row_count == len(settings)
    accuracies = list(table.columns[5].cells)
    assert accuracies == [f"{index:.1f}%" for index in reversed(range(16))]
    console = Console(width=120)
    with console.capture() as shown:
        console.print(table)
    first_row = next(line for line in shown.get().splitlines() if line.startswith("│  1 "))
    assert f"{settings[-1].lr:g}" in first_row


def test_the_times_are_stated_with_and_without_building() -> None:
    text = "\n".join(demo.timing_lines(16, fused_s=10.0, build_s=4.0, alone_s=12.0))
    assert "tracing and fusing 4.0 s" in text
    assert "1.20×" in text
    assert "2.00×" in text


def test_the_best_member_is_saved_with_its_settings(tmp_path: Path) -> None:
    setting = _sweep.settings()[3]
    model, _ = _sweep.build(setting)
    weights, record = demo.save_best(model, row(setting, 0.9), epochs=2, out=tmp_path / "new" / "folder")
    loaded = load_file(weights)
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[key], value) for key, value in model.state_dict().items())
    settings = json.loads(record.read_text(encoding="utf-8"))
    assert settings["lr"] == setting.lr
    assert settings["validation_accuracy"] == 0.9
    assert sorted(path.name for path in weights.parent.iterdir()) == ["best.json", "best.safetensors"]


@pytest.mark.slow
def test_the_demo_trains_both_ways_and_saves_the_best(tmp_path: Path) -> None:
    console = Console(quiet=True)
    rows = demo.run_demo(device="cpu", epochs=1, out=tmp_path, console=console)
    assert len(rows) == 16
    assert all(abs(placed.fused.loss - placed.alone.loss) < 0.1 for placed in rows)
    best = json.loads((tmp_path / "best.json").read_text(encoding="utf-8"))
    assert best["name"] == rows[0].setting.name
    assert best["validation_accuracy"] == max(placed.fused.accuracy for placed in rows)
    assert load_file(tmp_path / "best.safetensors")
