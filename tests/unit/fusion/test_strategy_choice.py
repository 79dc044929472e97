"""Which way is taken: the one asked for, the fastest one, or the first; and how often it is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from trainmux.errors import TrainmuxWarning
from trainmux.fusion._stacked import Context, Stacked
from trainmux.fusion.rules.convolution import CONVOLUTION
from trainmux.fusion.rules.matmul import MATMUL
from trainmux.fusion.rules.normalisation import BATCH_NORM
from trainmux.fusion.strategies import (
    FIXED,
    MEASURED,
    Family,
    OperatorTimes,
    TimesFile,
    Way,
    question_of,
    random_like,
)

CPU = torch.device("cpu")
aten = torch.ops.aten
OP = aten.mm.default


class Script:
    """A clock that does the work and then tells what it was told to tell, in turn; an error is raised."""

    def __init__(self, *told: float | Exception, glances: Sequence[float] = ()) -> None:
        self.told = list(told)
        self.glances = list(glances)

    def glance(self, branches: Sequence[Callable[[], Any]]) -> float:
        return self.glances.pop(0) if self.glances else 1.0

    def seconds(self, branches: Sequence[Callable[[], Any]]) -> float:
        for work in branches:
            work()
        taken = self.told.pop(0)
        if isinstance(taken, Exception):
            raise taken
        return taken


def works(*names: str) -> Callable[[], dict[str, list[Callable[[], None]]]]:
    return lambda: {name: [lambda: None] for name in names}


def times_of(*told: float | Exception, file: TimesFile | None = None) -> OperatorTimes:
    return OperatorTimes(CPU, file, Script(*told))


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ((3.0, 2.0, 1.0), "c"),
        ((1.0, 2.0, 3.0), "a"),
        ((1.0, 0.98, 1.1), "a"),  # too little to leave the first one for
        ((1.0, 0.96, 0.95), "c"),
        ((RuntimeError("no kernel"), 2.0, 1.0), "c"),
        ((1.0, torch.OutOfMemoryError("too large"), 3.0), "a"),
    ],
)
def test_the_fastest_is_found(told: tuple[float | Exception, ...], expected: str) -> None:
    assert times_of(*told).fastest("?", "abc", works(*"abc")) == expected


def test_what_is_far_behind_at_a_glance_is_not_looked_at_again() -> None:
    times = OperatorTimes(CPU, None, Script(3.0, 2.0, glances=(1.0, 2.6, 2.4)))
    assert times.seconds("?", "abc", works(*"abc")) == {"a": 3.0, "b": 2.6, "c": 2.0}


def test_a_question_with_one_candidate_needs_no_glance() -> None:
    times = OperatorTimes(CPU, None, Script(3.0, glances=(1.0,)))
    assert times.seconds("?", "a", works("a")) == {"a": 3.0}


def test_a_question_is_measured_once() -> None:
    times = times_of(2.0, 1.0)
    for _ in range(3):
        assert times.fastest("?", "ab", works(*"ab")) == "b"
    assert times.num_measured == 2


def test_where_nothing_runs_that_is_said_and_not_kept(tmp_path: Path) -> None:
    file = TimesFile(CPU, tmp_path)
    times = times_of(RuntimeError("no kernel image"), RuntimeError("no"), file=file)
    with pytest.warns(TrainmuxWarning, match=r"expected one of a, b to run on cpu .* no kernel image"):
        assert times.fastest("?", "ab", works(*"ab")) is None
    assert file.read() == {}


def test_the_next_process_finds_the_answers(tmp_path: Path) -> None:
    file = TimesFile(CPU, tmp_path)
    times_of(2.0, RuntimeError("no"), file=file).fastest("?", "ab", works(*"ab"))
    again = times_of(file=file)
    assert again.fastest("?", "ab", works(*"ab")) == "a"
    assert again.num_measured == 0


def test_a_new_way_is_measured_with_the_others(tmp_path: Path) -> None:
    file = TimesFile(CPU, tmp_path)
    times_of(2.0, 1.5, file=file).fastest("?", "ab", works(*"ab"))
    assert times_of(2.0, 1.5, 1.0, file=file).fastest("?", "abc", works(*"abc")) == "c"
    assert times_of(file=file).fastest("?", "ab", works(*"ab")) == "b"


def test_a_device_without_room_for_the_arguments_leaves_the_question_open(tmp_path: Path) -> None:
    def prepare() -> dict[str, list[Callable[[], None]]]:
        raise torch.OutOfMemoryError("no room")

    file = TimesFile(CPU, tmp_path)
    assert times_of(file=file).fastest("?", "ab", prepare) is None
    assert file.read() == {}


def test_what_may_not_be_measured_is_taken_from_what_is_known() -> None:
    times = times_of(2.0, 1.0)
    quiet = times.without_measuring()
    assert quiet.fastest("?", "ab", works(*"ab")) is None
    assert times.fastest("?", "ab", works(*"ab")) == "b"
    assert quiet.fastest("?", "ab", works(*"ab")) == "b"


def family(*, second_fits: bool = True) -> Family:
    def run(name: str) -> Callable[..., str]:
        return lambda context, op, *args, **kwargs: name

    return Family(
        "products",
        (
            Way("first", "the first", {OP: run("first")}),
            Way("second", "the second", {OP: run("second")}, lambda *args, **kwargs: second_fits),
            Way("other", "for another operator", {aten.bmm.default: run("other")}),
            Way("single", "alone", {OP: run("single")}, single=True),
        ),
    )


def call(wanted: str | None, times: OperatorTimes | None = None, width: int = 2) -> tuple[Context, Any]:
    asked = {} if wanted is None else {"products": wanted}
    args = (Stacked(torch.empty(width, 2, 3, device="meta")), torch.empty(3, 4, device="meta"))
    return Context(width, CPU, None, asked, times), args


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [(None, "first"), (FIXED, "first"), ("second", "second"), ("other", "first"), (MEASURED, "first")],
)
def test_without_times_the_first_or_the_one_asked_for(wanted: str | None, expected: str) -> None:
    context, args = call(wanted)
    choice = family().choose(context, OP, args, {})
    assert (choice.way.name, choice.measured) == (expected, False)


def test_measured_takes_the_fastest_and_says_so() -> None:
    context, args = call(MEASURED, times_of(2.0, 1.0))
    choice = family().choose(context, OP, args, {})
    assert (choice.way.name, choice.how) == ("second", "the second (measured)")


@pytest.mark.parametrize("wanted", [FIXED, "second"])
def test_nothing_is_measured_where_something_else_is_asked_for(wanted: str) -> None:
    times = times_of()
    context, args = call(wanted, times)
    family().choose(context, OP, args, {})
    assert times.num_measured == 0


def test_a_way_that_does_not_fit_gives_way() -> None:
    context, args = call("second")
    assert family(second_fits=False).choose(context, OP, args, {}).way.name == "first"


def test_nothing_is_measured_where_there_is_no_choice() -> None:
    times = times_of()
    context, args = call(MEASURED, times)
    assert not family(second_fits=False).choose(context, OP, args, {}).measured
    context, args = call(MEASURED, times, width=1)
    assert family().choose(context, OP, args, {}).way.name == "single"
    assert times.num_measured == 0


def test_everything_that_decides_is_part_of_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    def question(
        width: int = 2,
        shape: tuple[int, ...] = (2, 4, 8),
        strides: tuple[int, ...] = (32, 8, 1),
        dtype: torch.dtype = torch.float32,
        stacked: bool = True,
        op: Any = OP,
        alpha: float = 1.0,
    ) -> str:
        x = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        return question_of(width, op, (Stacked(x) if stacked else x, [1, 2]), {"alpha": alpha})

    plain = question()
    assert question() == plain
    others = [
        question(width=3),
        question(shape=(2, 8, 4), strides=(32, 4, 1)),
        question(strides=(32, 1, 4)),
        question(dtype=torch.bfloat16),
        question(stacked=False),
        question(op=aten.addmm.default),
        question(alpha=2.0),
    ]
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", not torch.backends.cudnn.allow_tf32)
    others.append(question())
    assert len({plain, *others}) == 1 + len(others)


def test_random_numbers_are_laid_out_as_described_and_never_zero() -> None:
    layouts = [((2, 3, 4), (12, 1, 3)), ((2, 3, 4), (0, 4, 1)), ((5,), (1,)), ((2, 3, 4, 5), (64, 1, 15, 3))]
    for shape, strides in layouts:
        described = torch.empty_strided(shape, strides, device="meta")
        made = random_like((Stacked(described), 7, None), CPU)
        assert made[1:] == (7, None)
        assert (made[0].tensor.shape, made[0].tensor.stride()) == (shape, strides)
        assert made[0].tensor.count_nonzero() == made[0].tensor.numel()
        assert made[0].tensor.unique().numel() > 1


def test_random_numbers_leave_the_users_own_alone() -> None:
    state = torch.get_rng_state()
    random_like(torch.empty(100, device="meta"), CPU)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("family", [CONVOLUTION, MATMUL, BATCH_NORM], ids=lambda family: family.name)
def test_a_table_names_each_way_once_and_has_one_for_every_operator(family: Family) -> None:
    for single in (True, False):
        ways = [way for way in family.ways if way.single == single]
        assert len({way.name for way in ways}) == len(ways)
        ops = {op for way in ways for op in way.runs}
        assert ops == set(ways[0].runs)  # the first, taken where nothing is said, knows them all
    assert not {"auto", FIXED, MEASURED} & {way.name for way in family.ways}
