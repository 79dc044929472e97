"""An operator with several ways to be fused: the ways as data, and the choice among them (D2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch._ops import OpOverload

from trainmux.fusion._stacked import Context
from trainmux.fusion.strategies._times import precision_text, random_like, text_of

FIXED, MEASURED = "fixed", "measured"

Runs = dict[OpOverload, Callable[..., Any]]


def always(*call: Any, **kwargs: Any) -> bool:
    """For a way that fits every call."""
    return True


@dataclass(frozen=True)
class Way:
    """One way to fuse the operators of a family.

    ``runs`` has a function for each of them, with a rule's arguments and results; ``fits`` is asked with
    the same arguments. ``how`` is what ``explain`` says. ``single`` ways are for arrays of one member,
    the others for several.
    """

    name: str
    how: str
    runs: Runs
    fits: Callable[..., bool] = always
    single: bool = False


@dataclass(frozen=True)
class Choice:
    """The way that was taken, and whether a measurement decided it."""

    way: Way
    measured: bool = False

    @property
    def how(self) -> str:
        return f"{self.way.how} (measured)" if self.measured else self.way.how


@dataclass(frozen=True)
class Family:
    """Operators that share their ways. The first way that fits is taken where nothing else is said."""

    name: str
    ways: tuple[Way, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The ways that can be asked for by name: those for several members."""
        return tuple(way.name for way in self.ways if not way.single)

    def candidates(
        self, context: Context, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Way]:
        """The ways that fit this call."""
        is_single = context.width == 1
        known = [way for way in self.ways if way.single == is_single and op in way.runs]
        return [way for way in known if way.fits(context, op, *args, **kwargs)]

    def choose(
        self, context: Context, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Choice:
        """The way asked for where it fits; the fastest where that is asked for; else the first."""
        fitting = self.candidates(context, op, args, kwargs)
        wanted = context.strategies.get(self.name, FIXED)
        named = [way for way in fitting if way.name == wanted]
        if named:
            return Choice(named[0])
        if wanted != MEASURED or context.times is None or len(fitting) == 1:
            return Choice(fitting[0])
        by_name = {way.name: way for way in fitting}
        question = question_of(context.width, op, args, kwargs)
        prepare = partial(_works, fitting, context, op, args, kwargs)
        fastest = context.times.fastest(question, tuple(by_name), prepare)
        return Choice(by_name[fastest], measured=True) if fastest is not None else Choice(fitting[0])


def question_of(width: int, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Everything that decides how fast a call is: operator, width, shapes, strides, dtypes, numbers."""
    named = " ".join(f"{name}={text_of(value)}" for name, value in sorted(kwargs.items()))
    given = " ".join(map(text_of, args))
    return " ".join(filter(None, (str(op), f"width={width}", given, named, precision_text())))


def _works(
    ways: Sequence[Way], context: Context, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, list[Callable[[], Any]]]:
    device = context.device
    real_args = random_like(tuple(args), device)
    real_kwargs = {name: random_like(value, device) for name, value in kwargs.items()}
    return {way.name: [partial(way.runs[op], context, op, *real_args, **real_kwargs)] for way in ways}
