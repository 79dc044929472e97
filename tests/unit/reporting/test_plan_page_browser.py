"""The page of a plan in a real browser: it draws, answers to mouse and keys, and fits its window."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from headless_browser import Browser, find_browser
from sample_pages import EVIL, evil_sample, large_sample, page_of
from sample_plans import ring_sample, turns_sample

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
    with Browser(executable, tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages by name, each written once."""
    folder = tmp_path_factory.mktemp("pages")
    smallest = turns_sample()
    texts = {
        "ring": page_of(ring_sample()),
        "predicted": page_of(ring_sample(), measured=False),
        "smallest": plan_page(smallest.plan, smallest.program, smallest.profiles, smallest.predicted),
        "evil": page_of(evil_sample(), title=EVIL),
        "large": page_of(large_sample()),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in texts}


def opened(browser: Browser, page: Path, *, width: int = 1280, dark: bool = False) -> Browser:
    browser.open(page, width=width, dark=dark)
    browser.wait_for(READY)
    return browser


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


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["ring", "smallest"])
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


def test_charts_are_drawn_again_when_the_colour_scheme_changes(
    browser: Browser, pages: dict[str, Path]
) -> None:
    opened(browser, pages["ring"])
    corner = "(() => document.querySelector('#lanes canvas').toDataURL())()"
    before = browser.evaluate(corner)
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    browser.evaluate(DRAWN)
    assert browser.evaluate(corner) != before


def test_hovering_memory_tells_the_bytes_of_each_class(browser: Browser, pages: dict[str, Path]) -> None:
    opened(browser, pages["ring"])
    place = box(browser, "#memory-0 canvas")
    browser.move_mouse(place["left"] + place["width"] / 2, place["top"] + place["height"] / 2)
    browser.wait_for("!document.getElementById('tooltip').hidden")
    told = text(browser, "#tooltip")
    assert "ms (predicted)" in told
    points = ring_sample().predicted.memory
    fixed = ring_sample().plan.fixed_bytes
    in_use = {sum(size for _, size in point.bytes_by_class) + point.workspace_bytes for point in points}
    assert any(f"in use{format_bytes(size + fixed)}" in told for size in in_use)
    for words in ("left of the budget", "parameter", "optimizer state"):
        assert words in told


def test_hovering_a_lane_tells_node_sub_array_start_and_duration(
    browser: Browser, pages: dict[str, Path]
) -> None:
    opened(browser, pages["ring"])
    place = box(browser, "#lanes canvas")
    browser.move_mouse(place["left"] + 80, place["top"] + 45)
    browser.wait_for("!document.getElementById('tooltip').hidden")
    told = text(browser, "#tooltip")
    assert told.startswith("blocks.11.mlp.backward")
    for words in ("backward", "sub-array0 (4 members)", "predicted start", "measured duration", "difference"):
        assert words in told
    browser.move_mouse(5, 5)
    browser.wait_for("document.getElementById('tooltip').hidden")


def test_a_gap_in_the_compute_lane_tells_what_it_waits_for(browser: Browser, pages: dict[str, Path]) -> None:
    opened(browser, pages["ring"])
    data = "JSON.parse(document.getElementById('plan-data').textContent)"
    start, duration, horizon = browser.evaluate(
        f"(() => {{ const [one, other] = {data}.timelines;"
        "const longest = one.stalls.durations.indexOf(Math.max(...one.stalls.durations));"
        "return [one.stalls.starts[longest], one.stalls.durations[longest],"
        " Math.max(one.duration, other.duration)]; })()"
    )
    place = box(browser, "#lanes canvas")
    share = (start + duration / 2) / horizon
    browser.move_mouse(place["left"] + 64 + share * (place["width"] - 78), place["top"] + 45)
    browser.wait_for("!document.getElementById('tooltip').hidden")
    assert text(browser, "#tooltip").startswith("compute is idle")
    assert "waits forprefetch blocks." in text(browser, "#tooltip")


def test_a_tap_shows_the_same_and_stays(browser: Browser, pages: dict[str, Path]) -> None:
    opened(browser, pages["ring"], width=400)
    place = box(browser, "#lanes canvas")
    browser.tap(place["left"] + 100, place["top"] + 45)
    browser.wait_for("!document.getElementById('tooltip').hidden")
    assert "predicted start" in text(browser, "#tooltip")
    tooltip = browser.evaluate(
        "(({left, right}) => [left, right])(document.getElementById('tooltip').getBoundingClientRect())"
    )
    assert tooltip[0] >= 0
    assert tooltip[1] <= 400
    browser.tap(200, place["top"] - 12)
    browser.wait_for("document.getElementById('tooltip').hidden")


def test_buttons_keys_and_mouse_move_the_window(browser: Browser, pages: dict[str, Path]) -> None:
    opened(browser, pages["ring"])
    whole = window(browser)
    assert whole.startswith("whole step")
    assert browser.evaluate("document.getElementById('zoom-out').disabled")
    browser.evaluate("document.getElementById('zoom-in').click()")
    zoomed = window(browser)
    assert " to " in zoomed
    browser.evaluate("document.getElementById('pan-right').click()")
    assert window(browser) != zoomed
    place = box(browser, "#lanes canvas")
    middle = place["left"] + place["width"] / 2
    before = window(browser)
    browser.drag((middle, place["top"] + 45), (middle + 100, place["top"] + 45))
    assert window(browser) != before
    browser.evaluate("document.querySelector('#lanes canvas').focus()")
    browser.press("+")
    smaller = window(browser)
    browser.press("-")
    assert window(browser) != smaller
    browser.press("ArrowLeft", shift=True)
    browser.press("0")
    assert window(browser) == whole
    browser.call(
        "Input.dispatchMouseEvent",
        type="mouseWheel",
        x=middle,
        y=place["top"] + 45,
        deltaX=0,
        deltaY=-240,
        modifiers=2,
    )
    browser.wait_for("!document.getElementById('window').textContent.startsWith('whole')")
    assert browser.problems == []


def test_arrows_walk_over_instructions_and_lanes_and_are_announced(
    browser: Browser, pages: dict[str, Path]
) -> None:
    opened(browser, pages["ring"])
    browser.evaluate("document.querySelector('#lanes canvas').focus()")
    said = []
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowDown", "ArrowDown", "ArrowDown"):
        browser.press(key)
        said.append(text(browser, "#announcer"))
    assert said[0].startswith("predicted, compute: loss.backward, starts at 0 ms, takes ")
    assert said[1] != said[0] == said[2]
    assert said[3].startswith("predicted, device to host: offload blocks.")
    assert said[4].startswith("predicted, host to device: prefetch blocks.")
    assert said[5].startswith("measured, compute: ")
    browser.press("Enter")
    assert " to " in window(browser)
    browser.press("Escape")
    assert browser.evaluate("document.getElementById('tooltip').hidden")
    browser.evaluate("document.querySelector('#memory-1 canvas').focus()")
    browser.press("ArrowRight")
    assert text(browser, "#announcer").startswith("measured, ")
    assert " in use of " in text(browser, "#announcer")


def test_everything_can_be_reached_by_tab(browser: Browser, pages: dict[str, Path]) -> None:
    opened(browser, pages["ring"])
    seen = set()
    for _ in range(60):
        browser.press("Tab")
        seen.add(
            browser.evaluate(
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


def test_tensors_are_largest_first_and_can_be_filtered_and_sorted(
    browser: Browser, pages: dict[str, Path]
) -> None:
    sample = ring_sample()
    opened(browser, pages["ring"])
    everything = [tensor for profile in sample.profiles for tensor in profile.tensors]
    largest = max(tensor.size_bytes for tensor in everything)
    assert tensor_column(browser, 3)[0] == f"{largest // 1024**2} MiB"
    assert text(browser, "[data-role=count]").startswith(f"25 of {len(everything)} tensors, ")
    browser.evaluate("document.querySelector('[data-role=more]').click()")
    assert len(tensor_column(browser, 0)) == 50

    choose(browser, "decision", "swapped")
    assert set(tensor_column(browser, 4)) == {"swapped"}
    assert len(tensor_column(browser, 4)) == len(sample.plan.swaps)
    assert all(cell.startswith("case 2b: idle") for cell in tensor_column(browser, 5))
    choose(browser, "decision", "recomputed")
    assert len(tensor_column(browser, 4)) == len(sample.plan.recomputes)
    assert "Made again by 1 node (2.20 ms) before blocks." in tensor_column(browser, 5)[0]
    choose(browser, "decision", "")
    choose(browser, "className", "batch")
    choose(browser, "subArray", "1")
    assert tensor_column(browser, 0) == ["batch.tokens"]
    choose(browser, "text", "no such tensor")
    assert tensor_column(browser, 0) == []
    assert text(browser, "[data-role=count]") == "No tensor matches: widen the filters."
    for name in ("className", "subArray"):
        choose(browser, name, "")
    choose(browser, "text", ".MLP.hidden")

    browser.evaluate("document.querySelector('#tensors th button').click()")
    header = "document.querySelector('#tensors th').getAttribute('aria-sort')"
    assert browser.evaluate(header) == "ascending"
    names = tensor_column(browser, 0)
    assert names[:3] == ["blocks.0.mlp.hidden", "blocks.0.mlp.hidden", "blocks.0.mlp.hidden.grad"]
    browser.evaluate("document.querySelector('#tensors th button').click()")
    assert browser.evaluate(header) == "descending"
    assert tensor_column(browser, 0)[0] == "blocks.11.mlp.hidden.grad"
    assert browser.problems == []


def test_a_tensor_can_be_shown_in_the_timeline(browser: Browser, pages: dict[str, Path]) -> None:
    opened(browser, pages["ring"])
    before = colours(browser, "#lanes canvas")
    name = text(browser, "#tensors button.link")
    browser.evaluate("document.querySelector('#tensors button.link').click()")
    browser.evaluate(DRAWN)
    assert text(browser, "#clear-highlight") == f"Stop highlighting {name}"
    assert text(browser, "#announcer") == f"{name}: 2 instructions highlighted in the timeline"
    assert colours(browser, "#lanes canvas") != before
    browser.evaluate("document.getElementById('clear-highlight').click()")
    assert browser.evaluate("document.getElementById('clear-highlight').hidden")


def test_partitions_sort_by_their_numbers(browser: Browser, pages: dict[str, Path]) -> None:
    opened(browser, pages["ring"])

    def sort(label: str) -> list[Any]:
        found: list[Any] = browser.evaluate(
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
    assert sort("Step")[0] == ""
    steps = sort("Step")
    assert steps[-1] == ""  # what does not fit has no time: it is the slowest
    assert [float(value) for value in steps[:-1]] == sorted(float(value) for value in steps[:-1])
    policies = sort("Policy")
    assert policies == sorted(policies)


def test_the_budget_curve_tells_what_a_budget_costs(browser: Browser, pages: dict[str, Path]) -> None:
    opened(browser, pages["ring"])
    browser.evaluate("document.querySelector('#budget-curve canvas').focus()")
    browser.press("ArrowRight")
    assert text(browser, "#announcer").startswith("budget ")
    assert "against the fastest" in text(browser, "#tooltip")
    place = box(browser, "#budget-curve canvas")
    browser.move_mouse(place["left"] + place["width"] - 40, place["top"] + 60)
    browser.wait_for("document.getElementById('tooltip').textContent.includes('0.0%')")


def test_a_page_without_measurement(browser: Browser, pages: dict[str, Path]) -> None:
    opened(browser, pages["predicted"])
    place = box(browser, "#lanes canvas")
    browser.move_mouse(place["left"] + 80, place["top"] + 45)
    browser.wait_for("!document.getElementById('tooltip').hidden")
    assert "measured" not in text(browser, "#tooltip")
    assert browser.problems == []


def test_prologue_and_epilogue_tell_their_nodes(browser: Browser, pages: dict[str, Path]) -> None:
    opened(browser, pages["ring"])
    sample = ring_sample()
    forward = sample.profiles[0].nodes[0].name
    backward = sample.profiles[0].nodes[-1].name
    for name, at, node, phase in (
        ("prologue", 66, forward, "forward"),
        ("epilogue", -16, backward, "update"),
    ):
        assert colours(browser, f"#{name} canvas") >= 4
        place = box(browser, f"#{name} canvas")
        assert place["height"] < 60
        x = place["left"] + (at if at > 0 else place["width"] + at)
        browser.move_mouse(x, place["top"] + 10)
        browser.wait_for("!document.getElementById('tooltip').hidden")
        told = text(browser, "#tooltip")
        assert node in told
        assert f"what{phase}" in told
        browser.move_mouse(5, 5)
        browser.wait_for("document.getElementById('tooltip').hidden")
    browser.evaluate("document.querySelector('#prologue canvas').focus()")
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    assert sample.profiles[0].nodes[1].name in text(browser, "#announcer")
    assert browser.problems == []


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
