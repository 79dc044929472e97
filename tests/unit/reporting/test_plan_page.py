"""The page of a plan, read as HTML: what stands in it, that nothing leaves it, that names cannot break it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import defaultdict
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any
from xml.etree.ElementTree import Element, TreeBuilder

import pytest
from sample_plans import EVIL, GIB, MIB, Sample, evil_sample, large_sample, ring_sample, turns_sample

from trainmux.errors import PlanError
from trainmux.ir import Compute, Free, Offload, Prefetch, Recompute, SubArray, Timeline, Wait
from trainmux.reporting import plan_page

VOID = {"meta", "input", "br", "link", "img"}


class Reader(HTMLParser):
    """A strict reader: every element must be closed where it was opened."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.builder = TreeBuilder()
        self.builder.start("page", {})
        self.feed(page)
        self.close()
        self.handle_endtag("page")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"<{tag}> repeats an attribute"
        self.builder.start(tag, {name: value or "" for name, value in attrs})
        if tag in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.builder.end(tag).tag == tag

    def handle_data(self, data: str) -> None:
        self.builder.data(data)


def read(page: str) -> Element:
    return Reader(page).builder.close()


def by_id(html: Element, name: str) -> Element:
    (found,) = html.findall(f".//*[@id='{name}']")
    return found


def text_of(element: Element) -> str:
    return "".join(element.itertext())


def data_of(page: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(text_of(by_id(read(page), "plan-data")))
    return loaded


@pytest.fixture(scope="module")
def sample() -> Sample:
    return ring_sample()


@pytest.fixture(scope="module")
def page(sample: Sample) -> str:
    return sample.page()


@pytest.fixture(scope="module")
def html(page: str) -> Element:
    return read(page)


def test_it_is_one_document_with_every_section_and_every_file(page: str, html: Element) -> None:
    assert page.startswith("<!doctype html>\n")
    assert html.find(".//html").attrib["lang"] == "en"
    assert text_of(html.find(".//title")) == text_of(html.find(".//h1")) == "A plan"
    sections = [section.attrib["id"] for section in html.findall(".//section")]
    assert sections == ["timeline", "numbers", "partitions", "budget", "tensors"]
    for section in html.findall(".//section"):
        assert by_id(html, section.attrib["aria-labelledby"]).tag == "h2"
    links = [link.attrib["href"] for link in html.findall(".//nav//a")]
    assert links == [f"#{one}" for one in sections]
    entries = list(files("trainmux.reporting").joinpath("page").iterdir())
    ours = [one for one in entries if not one.name.endswith("html") and not one.name.startswith("search.")]
    texts = [one.read_text(encoding="utf-8") for one in ours]
    assert texts
    assert all(text in page for text in texts)


def test_nothing_comes_from_outside_and_no_script_runs_but_the_page_s_own(page: str, html: Element) -> None:
    assert not re.search(r"""\b(https?|wss?|ftp|file|data|blob):|["'(]//""", page)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket|\bimport\b", page)
    assert not html.findall(".//link")
    for element in html.iter():
        assert {"src", "style"}.isdisjoint(element.attrib)
        assert not any(name.startswith("on") for name in element.attrib)
        assert element.attrib.get("href", "#").startswith("#")
    (policy,) = [one.attrib["content"] for one in html.findall(".//meta") if "http-equiv" in one.attrib]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    (script,) = [one for one in html.findall(".//script") if "type" not in one.attrib]
    for rule, element in (("script-src", script), ("style-src", html.find(".//style"))):
        digest = base64.b64encode(hashlib.sha256(text_of(element).encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"


def test_charts_have_labels_and_can_be_reached_by_keys(html: Element) -> None:
    canvases = html.findall(".//canvas")
    assert len(canvases) == 6  # memory twice, lanes, prologue, epilogue, budget
    for canvas in canvases:
        assert (canvas.attrib["tabindex"], canvas.attrib["role"]) == ("0", "application")
        assert len(canvas.attrib["aria-label"]) > 40
    for control in [*html.findall(".//input"), *html.findall(".//select")]:
        (label,) = [label for label in html.findall(".//label") if control in label]
        assert (label.text or "").strip()
    for button in html.findall(".//button"):
        assert "hidden" in button.attrib or text_of(button).strip() or button.attrib.get("aria-label")
    ids = [one.attrib["id"] for one in html.iter() if "id" in one.attrib]
    assert len(ids) == len(set(ids))


def spans_of(found: dict[str, Any]) -> dict[int, tuple[int, int]]:
    columns = [found["spans"][name] for name in ("instructions", "starts", "durations")]
    return {position: (start, start + length) for position, start, length in zip(*columns, strict=True)}


def given_spans(timeline: Timeline) -> dict[int, tuple[int, int]]:
    return {one.instruction: (round(one.start * 1e9), round(one.end * 1e9)) for one in timeline.spans}


def test_the_data_is_that_of_program_and_timelines(sample: Sample, page: str, html: Element) -> None:
    data = data_of(page)
    body, found = sample.program.body.instructions, data["instructions"]
    letters = {Compute: "C", Recompute: "R", Offload: "O", Prefetch: "P", Free: "F", Wait: "W"}
    assert found["kinds"] == "".join(letters[type(one)] for one in body)
    for one, where, what in zip(body, found["subArrays"], found["items"], strict=True):
        if isinstance(one, Wait):
            assert (data["lanes"][where], what) == (one.lane.value, one.on)
        else:
            assert [where, what] == list(vars(one).values())[:2]
    assert [one["source"] for one in data["timelines"]] == ["predicted", "measured"]
    for found, given in zip(data["timelines"], (sample.predicted, sample.measured), strict=True):
        assert found["duration"] == round(given.seconds * 1e9)
        assert spans_of(found) == given_spans(given)
        assert not found["memoryIsPredicted"]
        in_use = [sum(size for _, size in one.bytes_by_class) for one in given.memory]
        assert max(totals(found["memory"])) == max(in_use) + 8 * MIB  # and the workspace of a node
        assert totals(found["memory"])[-1] == in_use[-1]
    for found, timeline in zip(data["around"], (sample.prologue, sample.epilogue), strict=True):
        assert spans_of(found) == given_spans(timeline)
        caption = text_of(by_id(html, found["name"]).find(".//figcaption"))
        assert caption.endswith(f"step: {timeline.seconds * 1e3:.2f} ms")


def totals(memory: dict[str, Any]) -> list[int]:
    """Bytes in use after each step, from what changes with it."""
    flat, now = iter(memory["changes"]), defaultdict(int)
    found = [0] * len(memory["times"])
    for step, byte_class, size in zip(flat, flat, flat, strict=True):
        now[byte_class] = size
        found[step:] = [sum(now.values())] * (len(found) - step)
    return found


def test_the_data_has_plan_profiles_and_decisions(sample: Sample, page: str) -> None:
    data, plan = data_of(page), sample.plan
    sizes = (plan.budget_bytes, plan.fixed_bytes, plan.peak_bytes)
    assert (data["budget"], data["fixed"], data["reserved"]) == sizes
    assert [tuple(one["members"]) for one in data["subArrays"]] == [one.members for one in plan.partition]
    for found, given in zip(data["profiles"], sample.profiles, strict=True):
        assert found["nodes"] == [node.name for node in given.nodes]
        assert list(found["phases"]) == [node.phase.value[0] for node in given.nodes]
        assert found["tensors"] == [tensor.name for tensor in given.tensors]
        assert found["sizes"] == [tensor.size_bytes for tensor in given.tensors]
        classes = [data["classes"][position] for position in found["classes"]]
        assert classes == [tensor.byte_class.value for tensor in given.tensors]
    swap, again = plan.swaps[0], plan.recomputes[-1]
    assert len(data["decisions"]) == len(plan.swaps) + len(plan.recomputes)
    when = [*swap.offload_after, *swap.release_before, *swap.prefetch_prompt]
    assert data["decisions"][0] == [swap.sub_array, swap.tensor, "swapped", swap.reason, when]
    seconds = sample.profiles[again.sub_array].nodes[again.nodes[0]].seconds
    when = [*again.before, 1, round(seconds * 1e9)]
    assert data["decisions"][-1] == [again.sub_array, again.tensor, "recomputed", again.reason, when]
    assert data["budgetCurve"][0] == [sample.budget_curve[0][0], None]
    assert data["budgetCurve"][1][1] == round(sample.budget_curve[1][1] * 1e9)


def cells(table: Element) -> list[list[str]]:
    return [[text_of(cell) for cell in row] for row in table.findall(".//tbody//tr")]


def test_tables_compare_times_partitions_and_budgets(sample: Sample, html: Element) -> None:
    (numbers,) = by_id(html, "numbers").findall(".//table")
    heads = [text_of(head) for head in numbers.findall(".//thead//th")]
    assert heads == ["predicted", "measured", "difference"]
    predicted, measured = sample.predicted.seconds, sample.measured.seconds
    difference = f"{(measured / predicted - 1) * 100:+.1f}%"
    assert cells(numbers)[0] == ["Step", f"{predicted * 1e3:.2f} ms", f"{measured * 1e3:.2f} ms", difference]
    assert cells(numbers)[-1][1].endswith("GiB")

    chosen, tried = by_id(html, "partitions").findall(".//table")
    members = [one.members for one in sample.plan.partition]
    expected = [[str(at), str(len(names)), ", ".join(names)] for at, names in enumerate(members)]
    assert [row[:3] for row in cells(chosen)] == expected
    outcomes = sorted(attempt.lost_because or "chosen" for attempt in sample.plan.attempts)
    assert sorted(row[-1] for row in cells(tried)) == outcomes
    (marked,) = [row for row in tried.findall(".//tr") if row.attrib.get("class") == "chosen"]
    assert text_of(marked[-1]) == "chosen"
    assert float(marked[3].attrib["data-sort"]) == sample.plan.step_seconds
    assert cells(tried)[-1][3] == "-"  # does not fit
    assert "Tried: 4; 1,234 more partitions were left out" in text_of(by_id(html, "partitions"))

    rows = cells(by_id(html, "budget").find(".//table"))
    assert len(rows) == len(sample.budget_curve)
    assert rows[0][1] == "nothing fits"
    assert rows[3][0] == f"{sample.plan.budget_bytes / GIB:.2f} GiB"


def test_without_measured_pass_curve_and_ring_their_places_are_gone(html: Element) -> None:
    sample = turns_sample()
    page = plan_page(sample.plan, sample.program, sample.profiles, sample.predicted)
    smallest = read(page)
    assert text_of(smallest.find(".//title")) == "trainmux plan"
    sections = [one.attrib["id"] for one in smallest.findall(".//section")]
    assert sections == ["timeline", "numbers", "partitions", "tensors"]
    assert [text_of(head) for head in by_id(smallest, "numbers").findall(".//thead//th")] == ["predicted"]
    assert [text_of(caption)[:6] for caption in smallest.findall(".//figcaption")] == ["Memory", "Lanes"]
    assert "Only this partition was considered." in text_of(by_id(smallest, "partitions"))
    assert "nothing leaves the device" in text_of(smallest.find(".//dl"))
    assert "would be in use: within the budget" in text_of(smallest.find(".//dl"))
    assert "would be in use: 25.0% over the budget" in text_of(html.find(".//dl"))
    assert data_of(sample.page())["around"] == []  # nothing runs there


def test_a_measured_pass_without_bytes_shows_the_predicted_ones_and_says_so(sample: Sample) -> None:
    page = replace(sample, measured=replace(sample.measured, memory=())).page()
    captions = [text_of(caption) for caption in read(page).findall(".//figcaption")]
    assert captions[1] == "Memory, measured: bytes as predicted, on the measured clock"
    predicted, measured = data_of(page)["timelines"]
    assert measured["memoryIsPredicted"]
    assert measured["memory"]["changes"] == predicted["memory"]["changes"]
    assert measured["memory"]["times"] != predicted["memory"]["times"]


def test_no_name_can_break_out_of_its_place() -> None:
    sample = evil_sample()
    page = sample.page(EVIL)
    html = read(page)
    assert len(html.findall(".//script")) == 2
    assert not html.findall(".//img")
    assert text_of(html.find(".//title")) == EVIL
    data = data_of(page)
    assert data["profiles"][0]["nodes"] == [node.name for node in sample.profiles[0].nodes]
    assert data["subArrays"][0]["members"] == [EVIL, EVIL]
    assert data["decisions"][0][3] == EVIL
    assert not set("<&") & set(text_of(by_id(html, "plan-data")))
    assert {row[0] for row in cells(by_id(html, "partitions").findall(".//table")[1])} == {EVIL}


def test_any_name_makes_a_file_and_a_long_one_is_shortened() -> None:
    sample = ring_sample(num_layers=3, layer_name="half \ud83d" + "x" * 5000)
    partition = tuple(SubArray(("\udc00\x00",), one.profile) for one in sample.plan.partition)
    page = replace(sample, plan=replace(sample.plan, partition=partition)).page("\ud83d")
    assert page.encode("utf-8")
    assert max(len(name) for name in data_of(page)["profiles"][0]["nodes"]) == 160


def test_ten_thousand_instructions_fit_into_three_megabytes() -> None:
    sample = large_sample()
    assert len(sample.program.body.instructions) >= 10_000
    assert len(sample.page().encode("utf-8")) < 3_000_000


def test_what_does_not_belong_to_the_plan_is_refused(sample: Sample) -> None:
    other = turns_sample()
    body = replace(other.program.body, instructions=(Compute(0, 99), Compute(0, 1)))
    for wrong in (
        replace(sample, profiles=other.profiles),
        replace(sample, program=other.program),
        replace(sample, prologue=sample.epilogue),
        replace(other, program=replace(other.program, body=body)),
    ):
        with pytest.raises(PlanError):
            wrong.page()
