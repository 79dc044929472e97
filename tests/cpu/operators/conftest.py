"""Counts how the operators fared, at the end of a run."""

from __future__ import annotations

from collections import Counter

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "call":
                counts.update(dict(report.user_properties).get("operator states", {}))
    if counts:
        terminalreporter.section("operators")
        terminalreporter.write_line("  ".join(f"{state} {count}" for state, count in sorted(counts.items())))
