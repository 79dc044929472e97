"""The page of a plan in a real browser: it draws, answers to mouse and keys, and fits its window."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any, Protocol

import pytest
from headless_browser import Browser, find_browser
from sample_plans import EVIL, evil_sample, large_sample, ring_sample, turns_sample

from trainmux.reporting import plan_page
from trainmux.sizes import format_bytes

pytestmark = pytest.mark.skipif(
    find_browser() is None, reason="needs Chromium or Chrome on the PATH, or CHROMIUM naming one"
)
# Two frames: what was asked for before the first one has been drawn by the second.
DRAWN = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"


class Show(Protocol):
    """Open the page of a name in the browser, and wait for its charts."""

    def __call__(self, name: str, *, width: int = 1280, dark: bool = False) -> Browser: ...


@pytest.fixture(scope="module")
def show(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Show]:
    """Pages are written when they are first shown."""
    executable, folder = find_browser(), tmp_path_factory.mktemp("pages")
    least = turns_sample()
    texts = {
        "ring": ring_sample().page,
        "smallest": lambda: plan_page(least.plan, least.program, least.profiles, least.predicted),
        "evil": lambda: evil_sample().page(EVIL),
        "large": lambda: large_sample().page(),
    }
    assert executable is not None
    with closing(Browser(executable, tmp_path_factory.mktemp("browser"))) as browser:

        def opened(name: str, *, width: int = 1280, dark: bool = False) -> Browser:
            if not (page := folder / f"{name}.html").exists():
                page.write_text(texts[name](), encoding="utf-8")
            browser.open(page, width=width, dark=dark)
            browser.wait_for("document.documentElement.dataset.ready === 'true'")
            browser.evaluate(DRAWN)
            assert (browser.problems, browser.requested) == ([], [page.as_uri()])
            return browser

        yield opened


@pytest.fixture
def ring(show: Show) -> Browser:
    """The page of an ordinary plan, opened."""
    return show("ring")


def of(browser: Browser, selector: str, expression: str) -> Any:
    """The value of a JavaScript expression about ``one``, the first element that is selected."""
    return browser.evaluate(f"(one => {expression})(document.querySelector({selector!r}))")


def text(browser: Browser, selector: str) -> str:
    return str(of(browser, selector, "one.textContent"))


def click(browser: Browser, selector: str) -> None:
    of(browser, selector, "one.click()")


def press(browser: Browser, selector: str, *keys: str) -> str:
    """What is announced once keys were pressed on an element."""
    of(browser, selector, "one.focus()")
    for key in keys:
        browser.press(key)
    return text(browser, "#announcer")


def box(browser: Browser, selector: str) -> dict[str, float]:
    """Where an element is in the window, scrolled into it first."""
    of(browser, selector, "one.scrollIntoView({block: 'center', behavior: 'instant'})")
    browser.evaluate(DRAWN)
    found: dict[str, float] = of(browser, selector, "one.getBoundingClientRect().toJSON()")
    return found


def colours(browser: Browser, selector: str) -> int:
    """How many different colours a canvas shows."""
    pixels = "one.getContext('2d').getImageData(0, 0, one.width, one.height).data.buffer"
    return int(of(browser, selector, f"new Set(new Uint32Array({pixels})).size"))


def window(browser: Browser) -> str:
    return text(browser, "#window")


def wait_for_tooltip(browser: Browser, *, hidden: bool = False) -> str:
    browser.wait_for(f"document.getElementById('tooltip').hidden === {str(hidden).lower()}")
    return text(browser, "#tooltip")


@pytest.mark.parametrize(
    ("name", "dark", "width"), [("ring", False, 400), ("ring", True, 1280), ("smallest", False, 1280)]
)
def test_it_opens_without_complaint_and_fits_the_window(
    show: Show, name: str, dark: bool, width: int
) -> None:
    browser = show(name, width=width, dark=dark)
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert colours(browser, "#memory-0 canvas") >= 4
    assert colours(browser, "#lanes canvas") >= 4
    assert browser.evaluate("document.querySelectorAll('#memory-legend li').length") >= 4
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(15, 19, 23)" if dark else "rgb(244, 246, 248)")


def test_charts_are_drawn_again_when_the_colour_scheme_changes(ring: Browser) -> None:
    before = of(ring, "#lanes canvas", "one.toDataURL()")
    ring.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    ring.evaluate(DRAWN)
    assert of(ring, "#lanes canvas", "one.toDataURL()") != before


def hovered(browser: Browser, selector: str, share: float, y: float = 45) -> str:
    """The tooltip at a share of a chart's clock; 64 and 14 pixels beside it are for labels."""
    place = box(browser, selector)
    browser.move_mouse(place["left"] + 64 + share * (place["width"] - 78), place["top"] + y)
    return wait_for_tooltip(browser)


def test_charts_tell_what_lies_under_the_mouse(ring: Browser) -> None:
    told = hovered(ring, "#memory-0 canvas", 0.5, 130)
    fixed = ring_sample().plan.fixed_bytes
    points = ring_sample().predicted.memory
    in_use = {sum(size for _, size in point.bytes_by_class) + point.workspace_bytes for point in points}
    assert any(f"in use{format_bytes(size + fixed)}" in told for size in in_use)
    for words in ("ms (predicted)", "left of the budget", "parameter", "optimizer state"):
        assert words in told
    told = hovered(ring, "#lanes canvas", 0.01)
    assert told.startswith("blocks.")
    for words in ("sub-array", "predicted start", "measured duration", "difference"):
        assert words in told
    ring.move_mouse(5, 5)
    wait_for_tooltip(ring, hidden=True)
    data = "JSON.parse(document.getElementById('plan-data').textContent).timelines[0].stalls"
    start, duration = (ring.evaluate(f"{data}.{name}[1]") for name in ("starts", "durations"))
    horizon = max(ring_sample().predicted.seconds, ring_sample().measured.seconds)
    told = hovered(ring, "#lanes canvas", (start + duration / 2) / (horizon * 1e9))
    assert told.startswith("compute is idle")
    assert "waits forprefetch blocks." in told


def test_a_tap_shows_the_same_and_stays(show: Show) -> None:
    browser = show("ring", width=400)
    place = box(browser, "#lanes canvas")
    browser.tap(place["left"] + 100, place["top"] + 45)
    assert "predicted start" in wait_for_tooltip(browser)
    tooltip = box(browser, "#tooltip")
    assert 0 <= tooltip["left"] <= 400 - tooltip["width"]
    browser.tap(200, place["top"] - 12)
    wait_for_tooltip(browser, hidden=True)


def test_buttons_keys_and_mouse_move_the_window(ring: Browser) -> None:
    whole = window(ring)
    assert whole.startswith("whole step")
    assert of(ring, "#zoom-out", "one.disabled")
    place = box(ring, "#lanes canvas")
    middle, top = place["left"] + place["width"] / 2, place["top"] + 45
    seen = [whole]
    for move in (
        lambda: click(ring, "#zoom-in"),
        lambda: click(ring, "#pan-right"),
        lambda: ring.drag((middle, top), (middle + 100, top)),
        lambda: press(ring, "#lanes canvas", "+"),
        lambda: ring.press("-"),
        lambda: ring.press("ArrowLeft", shift=True),
    ):
        move()
        assert " to " in window(ring) != seen[-1]
        seen.append(window(ring))
    ring.press("0")
    assert window(ring) == whole
    wheel = {"deltaX": 0, "deltaY": -240, "modifiers": 2}
    ring.call("Input.dispatchMouseEvent", type="mouseWheel", x=middle, y=top, **wheel)
    ring.wait_for("!document.getElementById('window').textContent.startsWith('whole')")
    assert ring.problems == []


def test_arrows_walk_over_instructions_and_lanes_and_are_announced(ring: Browser) -> None:
    keys = ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowDown", "ArrowDown", "ArrowDown")
    said = [press(ring, "#lanes canvas", key) for key in keys]
    assert said[0].startswith("predicted, compute: loss.backward, starts at 0 ms, takes ")
    assert said[1] != said[0] == said[2]
    assert said[3].startswith("predicted, device to host: offload blocks.")
    assert said[4].startswith("predicted, host to device: prefetch blocks.")
    assert said[5].startswith("measured, compute: ")
    ring.press("Enter")
    assert " to " in window(ring)
    ring.press("Escape")
    assert of(ring, "#tooltip", "one.hidden")
    announced = press(ring, "#memory-1 canvas", "ArrowRight")
    assert announced.startswith("measured, ")
    assert " in use of " in announced


def test_everything_can_be_reached_by_tab(ring: Browser) -> None:
    name = "one.id || one.dataset.filter || one.closest('figure')?.id || one.closest('section')?.id"
    seen = set()
    for _ in range(60):
        ring.press("Tab")
        seen.add(ring.evaluate(f"(one => {name} || one.className || one.tagName)(document.activeElement)"))
    wanted = {"skip", "zoom-in", "memory-0", "memory-1", "lanes", "partitions", "budget-curve", "text"}
    assert wanted | {"decision", "className", "subArray", "tensors"} <= seen


def tensor_column(browser: Browser, column: int) -> list[str]:
    found: list[str] = browser.evaluate(
        f"[...document.querySelectorAll('#tensors tbody tr')].map(row => row.cells[{column}].textContent)"
    )
    return found


def choose(browser: Browser, name: str, value: str) -> None:
    change = f"(one.value = {value!r}, one.dispatchEvent(new Event('input')))"
    of(browser, f"[data-filter={name}]", change)


def test_tensors_are_largest_first_and_can_be_filtered_and_sorted(ring: Browser) -> None:
    sample = ring_sample()
    everything = [tensor for profile in sample.profiles for tensor in profile.tensors]
    largest = max(tensor.size_bytes for tensor in everything)
    assert tensor_column(ring, 3)[0] == f"{largest // 1024**2} MiB"
    assert text(ring, "[data-role=count]").startswith(f"25 of {len(everything)} tensors, ")
    click(ring, "[data-role=more]")
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

    click(ring, "#tensors th button")
    assert of(ring, "#tensors th", "one.getAttribute('aria-sort')") == "ascending"
    assert tensor_column(ring, 0)[:3] == ["blocks.0.hidden", "blocks.0.hidden", "blocks.0.hidden.grad"]
    click(ring, "#tensors th button")
    assert of(ring, "#tensors th", "one.getAttribute('aria-sort')") == "descending"
    assert tensor_column(ring, 0)[0] == "blocks.11.hidden.grad"
    assert ring.problems == []


def test_a_tensor_can_be_shown_in_the_timeline(ring: Browser) -> None:
    before = colours(ring, "#lanes canvas")
    name = text(ring, "#tensors button.link")
    click(ring, "#tensors button.link")
    ring.evaluate(DRAWN)
    assert text(ring, "#clear-highlight") == f"Stop highlighting {name}"
    assert text(ring, "#announcer") == f"{name}: 1 instruction highlighted in the timeline"
    assert colours(ring, "#lanes canvas") != before
    click(ring, "#clear-highlight")
    assert of(ring, "#clear-highlight", "one.hidden")


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
    assert press(ring, "#budget-curve canvas", "ArrowRight").startswith("budget ")
    assert "against the fastest" in text(ring, "#tooltip")
    nodes = ring_sample().profiles[0].nodes
    rows = ("prologue", 0.001, nodes[0], "forward"), ("epilogue", 0.999, nodes[-1], "update")
    for name, share, node, phase in rows:
        assert colours(ring, f"#{name} canvas") >= 4
        told = hovered(ring, f"#{name} canvas", share, 10)
        assert node.name in told
        assert f"what{phase}" in told
    assert nodes[1].name in press(ring, "#prologue canvas", "ArrowRight", "ArrowRight")
    assert ring.problems == []


def test_evil_names_are_shown_and_never_run(show: Show) -> None:
    browser = show("evil")
    assert browser.evaluate("document.title") == EVIL
    assert browser.evaluate("typeof window.evil") == "undefined"
    assert browser.evaluate("document.images.length") == 0
    assert any(EVIL in name for name in tensor_column(browser, 0))
    press(browser, "#lanes canvas", "ArrowRight", "ArrowRight", "ArrowRight")
    assert EVIL in text(browser, "#tooltip")
    click(browser, "#tensors button.link")
    assert browser.evaluate("document.images.length") == 0


def test_ten_thousand_instructions_stay_quick(show: Show) -> None:
    browser = show("large")
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
