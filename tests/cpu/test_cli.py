"""The command line: what it prints, refuses and saves."""

from __future__ import annotations

import builtins
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from trainmux.cli import demo
from trainmux.cli import main as entry
from trainmux.cli._app import app
from trainmux.errors import MemberError


def test_version_names_trainmux_and_torch() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert "trainmux 0" in result.output
    assert "torch 2" in result.output


@pytest.mark.parametrize("arguments", [["--device", "tpu"], ["--epochs", "0"], ["--device", "cuda"]])
def test_bad_options_are_refused(arguments: list[str]) -> None:
    if arguments[-1] == "cuda" and torch.cuda.is_available():
        pytest.skip("asks for a GPU where there is none")
    assert CliRunner().invoke(app, ["demo", *arguments]).exit_code == 2


@pytest.mark.parametrize("missing", ["typer", "sklearn", "rich", "safetensors"])
def test_a_missing_package_names_the_extra_if_that_has_it(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    is_library = missing == "safetensors"  # which the library itself needs
    with pytest.raises(ModuleNotFoundError if is_library else SystemExit) as stop:
        entry.main()
    assert ("trainmux[cli]" in str(stop.value)) is not is_library
    assert missing in str(stop.value)


def test_a_typed_error_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: object) -> None:
        raise MemberError("expected at least one member, got none; add one")

    monkeypatch.setattr(demo, "run_demo", refuse)
    monkeypatch.setattr(sys, "argv", ["trainmux", "demo"])
    with pytest.raises(SystemExit, match="expected at least one member"):
        entry.main()


@pytest.mark.slow
def test_the_demo_shows_equal_losses_and_saves_the_best(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=80)
    fused, alone = demo.run_demo(device="cpu", epochs=1, out=tmp_path / "new" / "folder", console=console)
    shown = console.file.getvalue()
    names = [setting.name for setting in demo.SETTINGS]
    assert len(set(names)) == len(names) == 16
    assert all(name in shown for name in names)
    assert "largest difference of any loss" in shown
    assert fused.losses.shape == alone.losses.shape == (22, 16)
    assert (fused.losses - alone.losses).abs().max() < 1e-4
    assert (fused.losses[-1] < fused.losses[0]).all()
    assert (fused.accuracies - alone.accuracies).abs().max() < 0.01

    best = json.loads((tmp_path / "new" / "folder" / "best.json").read_text(encoding="utf-8"))
    assert best["name"] in names
    assert best["validation_accuracy"] == fused.accuracies.max()
    model = demo.small_cnn()
    model.load_state_dict(load_file(tmp_path / "new" / "folder" / "best.safetensors"))
    digits = demo.Digits.load(torch.device("cpu"))
    with torch.no_grad():
        assert demo.accuracy_fn(model, digits.validation).item() == pytest.approx(best["validation_accuracy"])
