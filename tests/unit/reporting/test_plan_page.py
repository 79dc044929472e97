"""The page of a plan, read as HTML: what stands in it, that nothing leaves it, that names cannot break it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

import pytest
from sample_pages import EVIL, evil_sample, large_sample, page_of
from sample_plans import GIB, Sample, ring_sample, turns_sample

from trainmux.errors import PlanError
from trainmux.ir import ByteClass, Compute, Free, Offload, Prefetch, Recompute, SubArray, Timeline, Wait
from trainmux.reporting import plan_page

VOID = {"meta", "input", "br", "link", "img"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    children: list[Element] = field(default_factory=list)
    own_text: str = ""

    def all(self, tag: str) -> Iterator[Element]:
        for child in self.children:
            if child.tag == tag:
                yield child
            yield from child.all(tag)

    def by_id(self, name: str) -> Element:
        found = [one for one in self.descendants() if one.attributes.get("id") == name]
        assert len(found) == 1, f"{len(found)} elements have the id {name}"
        return found[0]

    def descendants(self) -> Iterator[Element]:
        for child in self.children:
            yield child
            yield from child.descendants()

    @property
    def text(self) -> str:
        return self.own_text + "".join(child.text for child in self.children)


class Reader(HTMLParser):
    """A strict reader: every element must be closed where it was opened."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Element("", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> repeats an attribute"
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> closes <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].own_text += data


def read(page: str) -> Element:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == [reader.root], "an element is left open"
    return reader.root


def data_of(page: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(read(page).by_id("plan-data").own_text)
    return loaded


@pytest.fixture(scope="module")
def sample() -> Sample:
    return ring_sample()


@pytest.fixture(scope="module")
def page(sample: Sample) -> str:
    return page_of(sample)


@pytest.fixture(scope="module")
def html(page: str) -> Element:
    return read(page)


def test_it_is_one_document_with_a_language_a_title_and_every_section(page: str, html: Element) -> None:
    assert page.startswith("<!doctype html>\n")
    assert next(html.all("html")).attributes["lang"] == "en"
    assert next(html.all("title")).text == "A plan"
    assert next(html.all("h1")).text == "A plan"
    sections = [section.attributes["id"] for section in html.all("section")]
    assert sections == ["timeline", "numbers", "partitions", "budget", "tensors"]
    for section in html.all("section"):
        assert html.by_id(section.attributes["aria-labelledby"]).tag == "h2"
    links = [link.attributes["href"] for link in next(html.all("nav")).all("a")]
    assert links == [f"#{name}" for name in sections]


def test_nothing_comes_from_outside(page: str, html: Element) -> None:
    assert not re.search(r"""\b(https?|wss?|ftp|file|data|blob):|["'(]//""", page)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket|\bimport\b", page)
    assert not list(html.all("link"))
    for element in html.descendants():
        assert "src" not in element.attributes
        assert not any(name.startswith("on") for name in element.attributes)
        assert "style" not in element.attributes
        href = element.attributes.get("href", "#")
        assert href.startswith("#")


def test_the_content_security_policy_names_the_page_s_own_script_and_style(html: Element) -> None:
    policy = next(
        meta.attributes["content"]
        for meta in html.all("meta")
        if meta.attributes.get("http-equiv") == "Content-Security-Policy"
    )
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    script = next(one for one in html.all("script") if "type" not in one.attributes)
    style = next(html.all("style"))
    for rule, element in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(element.own_text.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"


def test_every_file_of_the_page_is_in_it(page: str) -> None:
    entries = list(files("trainmux.reporting").joinpath("page").iterdir())
    assert entries
    assert all(entry.read_text(encoding="utf-8") in page for entry in entries)


def test_charts_have_labels_and_can_be_reached_by_keys(html: Element) -> None:
    canvases = list(html.all("canvas"))
    assert len(canvases) == 6  # memory twice, lanes, prologue, epilogue, budget
    for canvas in canvases:
        assert canvas.attributes["tabindex"] == "0"
        assert canvas.attributes["role"] == "application"
        assert len(canvas.attributes["aria-label"]) > 40
    for control in [*html.all("input"), *html.all("select")]:
        labelled = [label for label in html.all("label") if control in label.children]
        assert len(labelled) == 1
        assert labelled[0].own_text.strip()
    for button in html.all("button"):
        hidden_until_named = "hidden" in button.attributes
        assert hidden_until_named or button.text.strip() or button.attributes.get("aria-label")
    ids = [one.attributes["id"] for one in html.descendants() if "id" in one.attributes]
    assert len(ids) == len(set(ids))


def test_the_instructions_in_the_data_are_those_of_the_body(sample: Sample, page: str) -> None:
    data = data_of(page)
    found = data["instructions"]
    letters = {Compute: "C", Recompute: "R", Offload: "O", Prefetch: "P", Free: "F", Wait: "W"}
    body = sample.program.body.instructions
    assert found["kinds"] == "".join(letters[type(one)] for one in body)
    for one, sub_array, item in zip(body, found["subArrays"], found["items"], strict=True):
        match one:
            case Compute() | Recompute():
                assert (sub_array, item) == (one.sub_array, one.node)
            case Wait(lane, on):
                assert (data["lanes"][sub_array], item) == (lane.value, on)
            case _:
                assert (sub_array, item) == (one.sub_array, one.tensor)
    keeps = {str(at): list(one.keeps) for at, one in enumerate(body) if isinstance(one, Recompute)}
    assert found["keeps"] == keeps


def test_both_timelines_in_the_data_are_those_given(sample: Sample, page: str) -> None:
    data = data_of(page)
    assert [one["source"] for one in data["timelines"]] == ["predicted", "measured"]
    for found, given in zip(data["timelines"], (sample.predicted, sample.measured), strict=True):
        assert found["duration"] == round(given.seconds * 1e9)
        columns = [found["spans"][name] for name in ("instructions", "lanes", "starts", "durations")]
        spans = {
            instruction: (data["lanes"][int(lane)], start, start + duration)
            for instruction, lane, start, duration in zip(*columns, strict=True)
        }
        assert spans == {
            span.instruction: (span.lane.value, round(span.start * 1e9), round(span.end * 1e9))
            for span in given.spans
        }
        assert decoded_memory(data, found["memory"]) == expected_memory(given)
        assert not found["memoryIsPredicted"]


def decoded_memory(data: dict[str, Any], memory: dict[str, Any]) -> list[tuple[int, dict[str, int]]]:
    """Each step as its instruction and the bytes of every class that has some."""
    changes = defaultdict(list)
    flat = iter(memory["changes"])
    for step, position, size in zip(flat, flat, flat, strict=True):
        changes[step].append((data["classes"][position], size))
    now: dict[str, int] = {}
    steps = []
    for step, instruction in enumerate(memory["instructions"]):
        now |= dict(changes[step])
        steps.append((instruction, {name: size for name, size in now.items() if size}))
    return steps


def expected_memory(timeline: Timeline) -> list[tuple[int, dict[str, int]]]:
    has_span = {span.instruction for span in timeline.spans}
    steps = []
    for point in timeline.memory:
        sizes = {name.value: size for name, size in point.bytes_by_class if size}
        workspace = {"workspace": point.workspace_bytes} if point.workspace_bytes else {}
        steps.append((point.instruction, sizes | workspace))
        if workspace and point.instruction in has_span:
            steps.append((point.instruction, sizes))
    return steps


def test_plan_profiles_and_decisions_in_the_data_are_those_given(sample: Sample, page: str) -> None:
    data = data_of(page)
    plan = sample.plan
    assert data["budget"] == plan.budget_bytes
    assert data["fixed"] == plan.fixed_bytes
    assert data["reserved"] == plan.peak_bytes
    assert data["step"] == round(plan.step_seconds * 1e9)
    assert data["classes"] == [*(found.value for found in ByteClass), "workspace"]
    assert [tuple(one["members"]) for one in data["subArrays"]] == [one.members for one in plan.partition]
    for found, given in zip(data["profiles"], sample.profiles, strict=True):
        assert found["nodes"] == [node.name for node in given.nodes]
        assert list(found["phases"]) == [node.phase.value[0] for node in given.nodes]
        assert found["tensors"] == [tensor.name for tensor in given.tensors]
        assert found["sizes"] == [tensor.size_bytes for tensor in given.tensors]
        classes = [data["classes"][position] for position in found["classes"]]
        assert classes == [tensor.byte_class.value for tensor in given.tensors]
    decisions: list[Any] = []
    for swap in plan.swaps:
        when = [*swap.offload_after, *swap.release_before, *swap.prefetch_prompt]
        decisions.append([swap.sub_array, swap.tensor, "swapped", swap.reason, when])
    for one in plan.recomputes:
        seconds = sum(sample.profiles[one.sub_array].nodes[rank].seconds for rank in one.nodes)
        when = [*one.before, len(one.nodes), round(seconds * 1e9)]
        decisions.append([one.sub_array, one.tensor, "recomputed", one.reason, when])
    assert data["decisions"] == decisions
    assert data["budgetCurve"][0] == [sample.budget_curve[0][0], None]
    assert data["budgetCurve"][1][1] == round(sample.budget_curve[1][1] * 1e9)


def cells(table: Element) -> list[list[str]]:
    return [[cell.text for cell in row.children] for body in table.all("tbody") for row in body.all("tr")]


def test_predicted_and_measured_stand_side_by_side(sample: Sample, html: Element) -> None:
    table = next(html.by_id("numbers").all("table"))
    heads = [head.text for head in next(table.all("thead")).all("th")]
    assert heads == ["predicted", "measured", "difference"]
    rows = {row[0]: row[1:] for row in cells(table)}
    step = rows["Step"]
    assert step[0] == f"{sample.predicted.seconds * 1e3:.2f} ms"
    assert step[1] == f"{sample.measured.seconds * 1e3:.2f} ms"
    assert step[2] == f"{(sample.measured.seconds / sample.predicted.seconds - 1) * 100:+.1f}%"
    assert rows["Compute is idle"][0] == f"{sample.predicted.stall_seconds * 1e3:.2f} ms"
    assert rows["Most bytes in use"][0].endswith("GiB")


def test_the_partition_table_lists_every_attempt_once_and_marks_the_chosen(
    sample: Sample, html: Element
) -> None:
    chosen, tried = html.by_id("partitions").all("table")
    assert [row[:3] for row in cells(chosen)] == [
        ["0", "4", "lr=1e-4, lr=2e-4, lr=5e-4, lr=1e-3"],
        ["1", "3", "lr=2e-3, lr=5e-3, lr=1e-2"],
    ]
    rows = cells(tried)
    assert len(rows) == len(sample.plan.attempts)
    outcomes = sorted(attempt.lost_because or "chosen" for attempt in sample.plan.attempts)
    assert sorted(row[-1] for row in rows) == outcomes
    marked = [row for row in tried.all("tr") if row.attributes.get("class") == "chosen"]
    assert [row.children[-1].text for row in marked] == ["chosen"]
    step = next(cell for cell in marked[0].children if cell.attributes["data-label"] == "Step")
    assert float(step.attributes["data-sort"]) == sample.plan.step_seconds
    unfit = rows[-1]
    assert unfit[3] == "-"


def test_the_budget_table_has_the_curve(sample: Sample, html: Element) -> None:
    rows = cells(next(html.by_id("budget").all("table")))
    assert len(rows) == len(sample.budget_curve)
    assert rows[0][1] == "nothing fits"
    assert rows[4][0] == f"{sample.plan.budget_bytes / GIB:.2f} GiB"


def test_without_measured_and_curve_their_places_are_gone(sample: Sample) -> None:
    page = plan_page(sample.plan, sample.program, sample.profiles, sample.predicted)
    html = read(page)
    assert next(html.all("title")).text == "trainmux plan"
    assert "measured" not in "".join(figure.text for figure in html.all("figure"))
    sections = [section.attributes["id"] for section in html.all("section")]
    assert sections == ["timeline", "numbers", "partitions", "tensors"]
    assert len(data_of(page)["timelines"]) == 1
    assert [head.text for head in next(html.by_id("numbers").all("thead")).all("th")] == ["predicted"]


def test_what_runs_once_around_the_steps_is_drawn_small(sample: Sample, page: str, html: Element) -> None:
    for found, part, timeline, when in zip(
        data_of(page)["around"],
        (sample.program.prologue, sample.program.epilogue),
        (sample.prologue, sample.epilogue),
        ("Prologue, once before the first step", "Epilogue, once after the last step"),
        strict=True,
    ):
        caption = next(html.by_id(found["name"]).all("figcaption")).text
        assert caption == f"{when}: {timeline.seconds * 1e3:.2f} ms"
        assert found["duration"] == round(timeline.seconds * 1e9)
        assert len(found["instructions"]["kinds"]) == len(part.instructions)
        spans = {span.instruction: span for span in timeline.spans}
        assert sorted(found["spans"]["instructions"]) == sorted(spans)
        for position, start in zip(found["spans"]["instructions"], found["spans"]["starts"], strict=True):
            assert start == round(spans[position].start * 1e9)


def test_a_prologue_in_which_nothing_runs_is_not_drawn() -> None:
    page = page_of(turns_sample())
    assert data_of(page)["around"] == []
    assert "rologue" not in "".join(caption.text for caption in read(page).all("figcaption"))


def test_a_measured_pass_without_bytes_shows_the_predicted_ones_and_says_so(sample: Sample) -> None:
    page = page_of(replace(sample, measured=replace(sample.measured, memory=())))
    captions = [caption.text for caption in read(page).all("figcaption")]
    assert captions[:2] == [
        "Memory, predicted",
        "Memory, measured: bytes as predicted, on the measured clock",
    ]
    predicted, measured = data_of(page)["timelines"]
    assert measured["memoryIsPredicted"]
    assert measured["memory"]["changes"] == predicted["memory"]["changes"]
    assert measured["memory"]["times"] != predicted["memory"]["times"]


def test_the_smallest_plan_has_a_page(html: Element) -> None:
    sample = turns_sample()
    smallest = read(plan_page(sample.plan, sample.program, sample.profiles, sample.predicted))
    assert "Only this partition was considered." in smallest.by_id("partitions").text
    tiles = next(smallest.all("dl")).text
    assert "nothing leaves the device" in tiles
    assert "would be in use: within the budget" in tiles
    assert "would be in use: 25.0% over the budget" in next(html.all("dl")).text
    assert "Tried: 7; 1,234 more partitions were left out" in html.by_id("partitions").text


def test_no_name_can_break_out_of_its_place() -> None:
    sample = evil_sample()
    page = page_of(sample, title=EVIL)
    html = read(page)
    assert len(list(html.all("script"))) == 2
    assert not list(html.all("img"))
    assert next(html.all("title")).own_text == EVIL
    data = data_of(page)
    assert data["profiles"][0]["nodes"] == [node.name for node in sample.profiles[0].nodes]
    assert data["subArrays"][0]["members"] == [EVIL, EVIL]
    assert data["decisions"][0][3] == EVIL
    raw = html.by_id("plan-data").own_text
    assert "<" not in raw
    assert "&" not in raw
    policies = {row[0] for row in cells(list(html.by_id("partitions").all("table"))[1])}
    assert policies == {EVIL}


def test_any_name_makes_a_file_and_a_long_one_is_shortened() -> None:
    sample = ring_sample(num_layers=3, layer_name="half \ud83d" + "x" * 5000)
    partition = tuple(SubArray(("\udc00\x00",), one.profile) for one in sample.plan.partition)
    page = page_of(replace(sample, plan=replace(sample.plan, partition=partition)), title="\ud83d")
    assert page.encode("utf-8")
    assert max(len(name) for name in data_of(page)["profiles"][0]["nodes"]) == 160


def test_ten_thousand_instructions_fit_into_three_megabytes() -> None:
    sample = large_sample()
    assert len(sample.program.body.instructions) >= 10_000
    assert len(page_of(sample).encode("utf-8")) < 3_000_000


def test_what_does_not_belong_to_the_plan_is_refused(sample: Sample) -> None:
    other = turns_sample()
    instructions = (Compute(0, 99), *other.program.body.instructions[1:])
    program = replace(other.program, body=replace(other.program.body, instructions=instructions))
    for wrong in (
        replace(sample, profiles=other.profiles),
        replace(sample, program=other.program),
        replace(sample, prologue=sample.epilogue),
        replace(other, program=program),
    ):
        with pytest.raises(PlanError):
            page_of(wrong)
