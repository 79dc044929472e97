"""``trainmux doctor``: what this machine has for training, what is missing, and what to do about it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

import trainmux as tm

from ._doctor_checks import Finding, Level, check

_STYLES = {Level.OK: "green", Level.NOTE: "yellow", Level.PROBLEM: "bold red"}
_FORMAT = 1


class UnwritableFileError(Exception):
    """The file for the answers cannot be written."""


def run_doctor(*, quick: bool, json_file: Path | None, console: Console | None = None) -> bool:
    """Look, print and write what was asked for; whether training can work."""
    console = console or Console(highlight=False)
    if console.is_terminal:
        with console.status("looking at this machine"):
            facts = tm.inspect_machine(measures=not quick)
    else:
        facts = tm.inspect_machine(measures=not quick)
    findings = check(facts)
    for line in shown(findings, facts):
        console.print(line)
    if json_file is not None:
        write(json_file, findings, facts)
        console.print(Text(f"written to {json_file}"))
    return can_train(findings)


def can_train(findings: Iterable[Finding]) -> bool:
    """Whether nothing that was found is in the way of training."""
    return all(finding.level is not Level.PROBLEM for finding in findings)


def shown(findings: Sequence[Finding], facts: tm.MachineFacts) -> list[RenderableType]:
    """The findings as people read them, in any width and without colour."""
    lines: list[RenderableType] = []
    for section, group in groupby(findings, key=lambda finding: finding.section):
        lines += [Text(section, style="bold"), _rows(group)]
    lines += [Text(), Text(summary(findings, facts), style="bold")]
    return lines


def summary(findings: Iterable[Finding], facts: tm.MachineFacts) -> str:
    """One sentence: whether one can train here, where, and how much there is to read above."""
    levels = [finding.level for finding in findings]
    notes, problems = levels.count(Level.NOTE), levels.count(Level.PROBLEM)
    verdict = "Training cannot work as it is" if problems else f"Training works here, on {facts.device}"
    counts = [
        f"{count} {noun}{'s' if count != 1 else ''}"
        for count, noun in ((problems, "problem"), (notes, "note"))
        if count
    ]
    return f"{verdict}: {', '.join(counts) or 'nothing to note'} ({facts.seconds:.1f} s)."


def write(path: Path, findings: Sequence[Finding], facts: tm.MachineFacts) -> None:
    """All of it as JSON; ``UnwritableFileError`` where the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document(findings, facts), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise UnwritableFileError(f"expected a file that can be written, got {path}: {reason}") from error


def document(findings: Sequence[Finding], facts: tm.MachineFacts) -> dict[str, Any]:
    """What is written: the date, the findings, and the facts behind them."""
    return {
        "format": _FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "can_train": can_train(findings),
        "findings": [asdict(finding) | {"level": finding.level.value} for finding in findings],
        "facts": asdict(facts),
    }


def _rows(findings: Iterable[Finding]) -> Table:
    table = Table.grid(padding=(0, 1), expand=False)
    table.add_column(width=max(len(level.value) for level in Level), justify="right")
    table.add_column(overflow="fold")
    for finding in findings:
        text = Text(finding.text)
        if finding.remedy:
            text.append(f"\n> {finding.remedy}", style="italic")
        table.add_row(Text(finding.level.value, style=_STYLES[finding.level]), text)
    return table
