"""The page of a plan in a real browser: it draws, answers to mouse and keys, and fits its window."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from headless_browser import Browser, find_browser
from sample_plans import EVIL, evil_sample, large_sample, ring_sample, turns_sample

from trainmux.reporting import plan_page
from trainmux.sizes import format_bytes

pytestmark = pytest.mark.skipif(
    find_browser() is None, reason="needs Chromium or Chrome on the PATH, or CHROMIUM naming one"
)
READY = "document.documentElement.dataset.ready === 'true'"
# Two frames: what was asked for before the first one has been drawn by the second.
DRAWN = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    executable = find_browser()
    assert executable is not None
    with closing(Browser(executable, tmp_path_factory.mktemp("browser"))) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages by name, each written once."""
    folder = tmp_path_factory.mktemp("pages")
    smallest = turns_sample()
    texts = {
        "ring": ring_sample().page(),
        "smallest": plan_page(smallest.plan, smallest.program, smallest.profiles, smallest.predicted),
        "evil": evil_sample().page(EVIL),
        "large": large_sample().page(),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in texts}


def opened(browser: Browser, page: Path, *, width: int = 1280, dark: bool = False) -> Browser:
    browser.open(page, width=width, dark=dark)
    browser.wait_for(READY)
    return browser


@pytest.fixture
def ring(browser: Browser, pages: dict[str, Path]) -> Browser:
    """The page of an ordinary plan, opened."""
    return opened(browser, pages["ring"])


def text(browser: Browser, selector: str) -> str:
    found = browser.evaluate(f"document.querySelector({selector!r}).textContent")
    assert isinstance(found, str)
    return found


def box(browser: Browser, selector: str) -> dict[str, float]:
    """Where an element is in the window, scrolled into it first."""
    browser.evaluate(
        f"document.querySelector({selector!r}).scrollIntoView({{block: 'center', behavior: 'instant'}})"
    )
    browser.evaluate(DRAWN)
    found: dict[str, float] = browser.evaluate(
        "(({left, top, width, height}) => ({left, top, width, height}))"
        f"(document.querySelector({selector!r}).getBoundingClientRect())"
    )
    return found


def colours(browser: Browser, selector: str) -> int:
    """How many different colours a canvas shows."""
    found = browser.evaluate(
        f"(() => {{ const one = document.querySelector({selector!r});"
        "const pixels = new Uint32Array(one.getContext('2d')"
        ".getImageData(0, 0, one.width, one.height).data.buffer);"
        "return new Set(pixels).size; })()"
    )
    assert isinstance(found, int)
    return found


def window(browser: Browser) -> str:
    return text(browser, "#window")


@pytest.mark.parametrize(
    ("name", "dark", "width"), [("ring", False, 400), ("ring", True, 1280), ("smallest", False, 1280)]
)
def test_it_opens_without_complaint_and_fits_the_window(
    browser: Browser, pages: dict[str, Path], name: str, dark: bool, width: int
) -> None:
    opened(browser, pages[name], width=width, dark=dark)
    browser.evaluate(DRAWN)
    assert browser.problems == []
    assert browser.requested == [pages[name].as_uri()]
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert colours(browser, "#memory-0 canvas") >= 4
    assert colours(browser, "#lanes canvas") >= 4
    assert browser.evaluate("document.querySelectorAll('#memory-legend li').length") >= 4
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(15, 19, 23)" if dark else "rgb(244, 246, 248)")


def test_charts_are_drawn_again_when_the_colour_scheme_changes(ring: Browser) -> None:
    corner = "(() => document.querySelector('#lanes canvas').toDataURL())()"
    before = ring.evaluate(corner)
    ring.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    ring.evaluate(DRAWN)
    assert ring.evaluate(corner) != before


def hovered(browser: Browser, selector: str, x: float, y: float = 45) -> str:
    """The tooltip at a place of a chart."""
    place = box(browser, selector)
    browser.move_mouse(place["left"] + (x if x > 1 else x * place["width"]), place["top"] + y)
    browser.wait_for("!document.getElementById('tooltip').hidden")
    return text(browser, "#tooltip")


def test_charts_tell_what_lies_under_the_mouse(ring: Browser) -> None:
    told = hovered(ring, "#memory-0 canvas", 0.5, 130)
    fixed = ring_sample().plan.fixed_bytes
    points = ring_sample().predicted.memory
    in_use = {sum(size for _, size in point.bytes_by_class) + point.workspace_bytes for point in points}
    assert any(f"in use{format_bytes(size + fixed)}" in told for size in in_use)
    for words in ("ms (predicted)", "left of the budget", "parameter", "optimizer state"):
        assert words in told
    told = hovered(ring, "#lanes canvas", 80)
    assert told.startswith("blocks.")
    for words in ("sub-array", "predicted start", "measured duration", "difference"):
        assert words in told
    ring.move_mouse(5, 5)
    ring.wait_for("document.getElementById('tooltip').hidden")
    place, horizon = (
        box(ring, "#lanes canvas"),
        max(ring_sample().predicted.seconds, ring_sample().measured.seconds),
    )
    data = "JSON.parse(document.getElementById('plan-data').textContent).timelines[0].stalls"
    start, duration = (ring.evaluate(f"{data}.{name}[1]") for name in ("starts", "durations"))
    share = (start + duration / 2) / (horizon * 1e9)
    told = hovered(ring, "#lanes canvas", 64 + share * (place["width"] - 78))
    assert told.startswith("compute is idle")
    assert "waits forprefetch blocks." in told


def test_a_tap_shows_the_same_and_stays(browser: Browser, pages: dict[str, Path]) -> None:
    opened(browser, pages["ring"], width=400)
    place = box(browser, "#lanes canvas")
    browser.tap(place["left"] + 100, place["top"] + 45)
    browser.wait_for("!document.getElementById('tooltip').hidden")
    assert "predicted start" in text(browser, "#tooltip")
    tooltip = box(browser, "#tooltip")
    assert 0 <= tooltip["left"] <= 400 - tooltip["width"]
    browser.tap(200, place["top"] - 12)
    browser.wait_for("document.getElementById('tooltip').hidden")


def test_buttons_keys_and_mouse_move_the_window(ring: Browser) -> None:
    whole = window(ring)
    assert whole.startswith("whole step")
    assert ring.evaluate("document.getElementById('zoom-out').disabled")
    ring.evaluate("document.getElementById('zoom-in').click()")
    zoomed = window(ring)
    assert " to " in zoomed
    ring.evaluate("document.getElementById('pan-right').click()")
    assert window(ring) != zoomed
    place = box(ring, "#lanes canvas")
    middle = place["left"] + place["width"] / 2
    before = window(ring)
    ring.drag((middle, place["top"] + 45), (middle + 100, place["top"] + 45))
    assert window(ring) != before
    ring.evaluate("document.querySelector('#lanes canvas').focus()")
    ring.press("+")
    smaller = window(ring)
    ring.press("-")
    assert window(ring) != smaller
    ring.press("ArrowLeft", shift=True)
    ring.press("0")
    assert window(ring) == whole
    ring.call(
        "Input.dispatchMouseEvent",
        type="mouseWheel",
        x=middle,
        y=place["top"] + 45,
        deltaX=0,
        deltaY=-240,
        modifiers=2,
    )
    ring.wait_for("!document.getElementById('window').textContent.startsWith('whole')")
    assert ring.problems == []


def test_arrows_walk_over_instructions_and_lanes_and_are_announced(ring: Browser) -> None:
    ring.evaluate("document.querySelector('#lanes canvas').focus()")
    said = []
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowDown", "ArrowDown", "ArrowDown"):
        ring.press(key)
        said.append(text(ring, "#announcer"))
    assert said[0].startswith("predicted, compute: loss.backward, starts at 0 ms, takes ")
    assert said[1] != said[0] == said[2]
    assert said[3].startswith("predicted, device to host: offload blocks.")
    assert said[4].startswith("predicted, host to device: prefetch blocks.")
    assert said[5].startswith("measured, compute: ")
    ring.press("Enter")
    assert " to " in window(ring)
    ring.press("Escape")
    assert ring.evaluate("document.getElementById('tooltip').hidden")
    ring.evaluate("document.querySelector('#memory-1 canvas').focus()")
    ring.press("ArrowRight")
    assert text(ring, "#announcer").startswith("measured, ")
    assert " in use of " in text(ring, "#announcer")


def test_everything_can_be_reached_by_tab(ring: Browser) -> None:
    seen = set()
    for _ in range(60):
        ring.press("Tab")
        seen.add(
            ring.evaluate(
                "(() => { const one = document.activeElement;"
                "return one.id || one.dataset.filter || one.closest('figure')?.id ||"
                " one.closest('section')?.id || one.className || one.tagName; })()"
            )
        )
    wanted = {"skip", "zoom-in", "memory-0", "memory-1", "lanes", "partitions", "budget-curve", "text"}
    assert wanted | {"decision", "className", "subArray", "tensors"} <= seen


def tensor_column(browser: Browser, column: int) -> list[str]:
    found: list[str] = browser.evaluate(
        f"[...document.querySelectorAll('#tensors tbody tr')].map(row => row.cells[{column}].textContent)"
    )
    return found


def choose(browser: Browser, name: str, value: str) -> None:
    browser.evaluate(
        f"(() => {{ const one = document.querySelector('[data-filter={name}]'); one.value = {value!r};"
        "one.dispatchEvent(new Event('input')); })()"
    )


def test_tensors_are_largest_first_and_can_be_filtered_and_sorted(ring: Browser) -> None:
    sample = ring_sample()
    everything = [tensor for profile in sample.profiles for tensor in profile.tensors]
    largest = max(tensor.size_bytes for tensor in everything)
    assert tensor_column(ring, 3)[0] == f"{largest // 1024**2} MiB"
    assert text(ring, "[data-role=count]").startswith(f"25 of {len(everything)} tensors, ")
    ring.evaluate("document.querySelector('[data-role=more]').click()")
    assert len(tensor_column(ring, 0)) == 50

    choose(ring, "decision", "swapped")
    assert set(tensor_column(ring, 4)) == {"swapped"}
    assert len(tensor_column(ring, 4)) == len(sample.plan.swaps)
    assert all(cell.startswith("case 2b: idle") for cell in tensor_column(ring, 5))
    choose(ring, "decision", "recomputed")
    assert len(tensor_column(ring, 4)) == len(sample.plan.recomputes)
    assert "Made again by 1 node (2.20 ms) before blocks." in tensor_column(ring, 5)[0]
    choose(ring, "decision", "")
    choose(ring, "className", "batch")
    choose(ring, "subArray", "1")
    assert tensor_column(ring, 0) == ["batch.tokens"]
    choose(ring, "text", "no such tensor")
    assert tensor_column(ring, 0) == []
    assert text(ring, "[data-role=count]") == "No tensor matches: widen the filters."
    for name in ("className", "subArray"):
        choose(ring, name, "")
    choose(ring, "text", ".HIDDEN")

    ring.evaluate("document.querySelector('#tensors th button').click()")
    header = "document.querySelector('#tensors th').getAttribute('aria-sort')"
    assert ring.evaluate(header) == "ascending"
    assert tensor_column(ring, 0)[:3] == ["blocks.0.hidden", "blocks.0.hidden", "blocks.0.hidden.grad"]
    ring.evaluate("document.querySelector('#tensors th button').click()")
    assert ring.evaluate(header) == "descending"
    assert tensor_column(ring, 0)[0] == "blocks.11.hidden.grad"
    assert ring.problems == []


def test_a_tensor_can_be_shown_in_the_timeline(ring: Browser) -> None:
    before = colours(ring, "#lanes canvas")
    name = text(ring, "#tensors button.link")
    ring.evaluate("document.querySelector('#tensors button.link').click()")
    ring.evaluate(DRAWN)
    assert text(ring, "#clear-highlight") == f"Stop highlighting {name}"
    assert text(ring, "#announcer") == f"{name}: 2 instructions highlighted in the timeline"
    assert colours(ring, "#lanes canvas") != before
    ring.evaluate("document.getElementById('clear-highlight').click()")
    assert ring.evaluate("document.getElementById('clear-highlight').hidden")


def test_partitions_sort_by_their_numbers(ring: Browser) -> None:
    def sort(label: str) -> list[Any]:
        found: list[Any] = ring.evaluate(
            "(() => { const table = document.querySelectorAll('#partitions table')[1];"
            "const heads = [...table.tHead.rows[0].cells];"
            f"const at = heads.findIndex(head => head.textContent.trim() === {label!r});"
            "heads[at].querySelector('button').click();"
            "return [...table.tBodies[0].rows].map(row => row.cells[at].dataset.sort); })()"
        )
        return found

    peaks = [float(value) for value in sort("Peak")]
    assert peaks == sorted(peaks, reverse=True)
    assert [float(value) for value in sort("Peak")] == peaks[::-1]
    assert sort("Step")[0] == "" == sort("Step")[-1]  # what does not fit has no time: it is the slowest
    policies = sort("Policy")
    assert policies == sorted(policies)


def test_the_budget_curve_and_what_runs_once_are_told(ring: Browser) -> None:
    ring.evaluate("document.querySelector('#budget-curve canvas').focus()")
    ring.press("ArrowRight")
    assert text(ring, "#announcer").startswith("budget ")
    assert "against the fastest" in text(ring, "#tooltip")
    nodes = ring_sample().profiles[0].nodes
    for name, at, node, phase in (
        ("prologue", 66, nodes[0], "forward"),
        ("epilogue", 0.99, nodes[-1], "update"),
    ):
        assert colours(ring, f"#{name} canvas") >= 4
        told = hovered(ring, f"#{name} canvas", at, 10)
        assert node.name in told
        assert f"what{phase}" in told
    ring.evaluate("document.querySelector('#prologue canvas').focus()")
    ring.press("ArrowRight")
    ring.press("ArrowRight")
    assert nodes[1].name in text(ring, "#announcer")
    assert ring.problems == []


def test_evil_names_are_shown_and_never_run(browser: Browser, pages: dict[str, Path]) -> None:
    opened(browser, pages["evil"])
    assert browser.problems == []
    assert browser.requested == [pages["evil"].as_uri()]
    assert browser.evaluate("document.title") == EVIL
    assert browser.evaluate("typeof window.evil") == "undefined"
    assert browser.evaluate("document.images.length") == 0
    assert any(EVIL in name for name in tensor_column(browser, 0))
    browser.evaluate("document.querySelector('#lanes canvas').focus()")
    for _ in range(3):
        browser.press("ArrowRight")
    assert EVIL in text(browser, "#tooltip")
    browser.evaluate("document.querySelector('#tensors button.link').click()")
    assert browser.evaluate("document.images.length") == 0


def test_ten_thousand_instructions_stay_quick(browser: Browser, pages: dict[str, Path]) -> None:
    opened(browser, pages["large"])
    # A generous limit for a machine that is busy with other things; it takes about a tenth of it alone.
    zoomed = browser.evaluate(
        "(async () => { const times = [];"
        "for (let turn = 0; turn < 8; turn += 1) {"
        "  document.getElementById(turn < 4 ? 'zoom-in' : 'zoom-out').click();"
        "  const begin = performance.now();"
        "  await new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)));"
        "  times.push(performance.now() - begin);"
        "} return Math.min(...times); })()"
    )
    assert zoomed < 300
    sorting = browser.evaluate(
        "(() => { const begin = performance.now();"
        "document.querySelector('#tensors th button').click();"
        "return performance.now() - begin; })()"
    )
    assert sorting < 1000
    assert browser.evaluate("document.querySelectorAll('#tensors tbody tr').length") == 25
    assert browser.problems == []
