"""The table of the papers' claims: made of committed results, and nothing it lacks is hidden."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="needs the extra of the benchmarks")
pytest.importorskip("pandas", reason="needs the extra of the benchmarks")

from benchmarks import claims
from benchmarks.__main__ import app
from typer.testing import CliRunner

PAGE = Path(__file__).resolve().parents[3] / "docs" / "papers.md"


def test_the_page_says_what_the_committed_results_say(tmp_path: Path) -> None:
    copied = Path(shutil.copy(PAGE, tmp_path / "papers.md"))
    assert CliRunner().invoke(app, ["claims", str(copied)]).exit_code == 0
    assert copied.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")


def test_every_claim_has_a_number_or_is_named_as_missing(tmp_path: Path) -> None:
    shown = claims.part("table", claims.Evidence())
    for each in claims.CLAIMS:
        assert each.claim[1:] in shown
    nothing = claims.Evidence(tmp_path)
    assert claims.rows(nothing) == []
    assert all(each.measured(nothing) is None for each in claims.CLAIMS)
