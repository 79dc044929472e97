"""The page of a search in a real browser: it draws offline, best trial first, and runs nobody's code."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.unit.reporting.headless_browser import Browser, find_browser

import trainmux as tm

pytest.importorskip("plotly")

needs_browser = pytest.mark.skipif(
    find_browser() is None, reason="needs Chromium or Chrome on the PATH, or CHROMIUM naming one"
)
EVIL = "</script><script>window.isBad = true</script><img src=x onerror='window.isBad = true'>"


def trial(number: int, state: str, epochs: int, params: dict[str, Any], name: str = "") -> tm.Trial:
    """A trial whose error falls towards the distance of its learning rate from 0.01."""
    made = tm.Trial(number, name or f"trial-{number}", params, 10)
    floor = abs(math.log10(params.get("lr", 0.1)) + 2) + 0.1
    for epoch in range(1, epochs + 1):
        metrics = {"val_error": floor + 1 / epoch, "val_size": 10.0 * number + 1}
        made.records.append(tm.EpochRecord(epoch, epoch, 2 * floor + 1 / epoch, metrics))
    made.state, made.seconds = tm.TrialState(state), epochs / 2
    if made.records:
        made.values = (made.records[-1].metrics["val_error"],)
    if state == "failed":
        made.error = "RuntimeError: out of memory"
    return made


def results(count: int, *, evil: bool = False, metrics: int = 1, state: str = "") -> tm.Results:
    generator = random.Random(0)
    trials = []
    for number in range(count):
        how = state or ("failed" if number % 50 == 7 else "pruned" if number % 3 == 2 else "complete")
        params: dict[str, Any] = {"lr": 10 ** generator.uniform(-4, -1), "layers": generator.randint(1, 3)}
        params["kind"] = generator.choice([f"a{EVIL * evil}", f"b{EVIL * evil}", None])
        if number % 2:
            params[f"dropout{EVIL * evil}"] = generator.random()  # asked for in every other trial
        name = f"{number}{EVIL}" if evil else ""
        trials.append(trial(number, how, {"complete": 10, "pruned": 3}.get(how, 0), params, name))
        if metrics > 1 and trials[-1].values:
            trials[-1].values = tuple(trials[-1].records[-1].metrics.values())
    return tm.Results(trials, ("error", "size")[:metrics], ("min", "max")[:metrics])


@pytest.fixture(scope="module")
def show(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Browser]]:
    """Write the page of results and open it."""
    executable, folder = find_browser(), tmp_path_factory.mktemp("pages")
    assert executable is not None
    with closing(Browser(executable, tmp_path_factory.mktemp("browser"))) as browser:

        def opened(found: tm.Results, *, width: int = 1280, dark: bool = False) -> Browser:
            page = folder / "page.html"
            found.report(page, title="A search")
            browser.open(page, width=width, dark=dark)
            browser.wait_for("document.documentElement.dataset.ready === 'true'")
            assert (browser.problems, browser.requested) == ([], [page.as_uri()])  # nothing from elsewhere
            return browser

        yield opened


def column(browser: Browser, name: str) -> list[str]:
    """The texts of a column of the table, from the top."""
    return browser.evaluate(
        f"[...document.querySelectorAll('#trials td[data-label=\"{name}\"]')].map(cell => cell.innerText)"
    )


def charts(browser: Browser) -> list[str]:
    """The sections that have charts with something drawn in them."""
    return browser.evaluate(
        "[...document.querySelectorAll('.plot')].filter(plot => plot.querySelector('.trace, .point'))"
        ".map(plot => plot.closest('section').id)"
    )


@needs_browser
def test_five_hundred_trials(show: Callable[..., Browser]) -> None:
    found = results(500)
    browser = show(found)
    assert charts(browser) == ["curves", "curves", "parameters", "importance"]
    ranked = [one.name for one in found.ranked()]
    names = column(browser, "Trial")
    assert names[: len(ranked)] == ranked
    assert len(names) == 500
    assert browser.evaluate("document.querySelector('#trials tr.chosen').innerText").split()[1] == ranked[0]
    assert ranked[0] in browser.evaluate("document.querySelector('.tiles').innerText")
    assert sorted(set(column(browser, "State"))) == ["complete", "failed", "pruned"]
    # What matters is found: the value depends on the learning rate alone.
    ticks = browser.evaluate(
        "[...document.querySelectorAll('#importance .ytick')].map(tick => tick.textContent)"
    )
    assert ticks[-1] == "lr"
    # A click on a column sorts by it.
    browser.evaluate("document.querySelector('#trials th:nth-child(5) button').click()")
    rates = [float(rate) for rate in column(browser, "lr")]
    assert rates == sorted(rates, reverse=True)


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_narrow_window_in_both_colour_schemes(show: Callable[..., Browser], dark: bool) -> None:
    browser = show(results(9), width=400, dark=dark)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 400
    ink = browser.evaluate("getComputedStyle(document.querySelector('.plot text')).fill")
    assert (min(map(int, re.findall(r"\d+", ink)[:3])) > 150) == dark


@needs_browser
def test_names_and_parameters_are_text_only(show: Callable[..., Browser]) -> None:
    found = results(20, evil=True)
    browser = show(found)
    assert browser.evaluate("window.isBad") is None
    assert browser.evaluate("document.querySelectorAll('main img').length") == 0
    assert column(browser, "Trial")[0] == found.best.name
    assert charts(browser) == ["curves", "curves", "parameters", "importance"]


@needs_browser
def test_several_metrics(show: Callable[..., Browser]) -> None:
    browser = show(results(30, metrics=2))
    expected = {"curves": 3, "pareto": 1, "parameters": 2, "importance": 2}
    assert {key: charts(browser).count(key) for key in expected} == expected
    assert browser.evaluate("document.querySelector('#trials tr.chosen')") is None  # none is best in both


@needs_browser
def test_little_to_show(show: Callable[..., Browser]) -> None:
    """One trial, or none that trained: what is missing is said."""
    browser = show(results(1))
    assert charts(browser) == ["curves", "curves"]
    assert "Needs 4 complete trials" in browser.evaluate("document.querySelector('#importance').innerText")
    browser = show(results(3, state="failed"))
    assert charts(browser) == []
    assert "No trial has finished an epoch" in browser.evaluate("document.body.innerText")
    assert column(browser, "Error") == ["RuntimeError: out of memory"] * 3


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(tm.ConfigError, match="with trials"):
        results(0).report(tmp_path / "page.html")
    (tmp_path / "file").touch()
    with pytest.raises(tm.SearchError, match="A folder of the path is a file"):
        results(1).report(tmp_path / "file" / "page.html")
