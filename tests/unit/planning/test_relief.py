"""Swaps that a limit does not ask for are undone: what is left fits, and not one more could be undone."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.random_steps import random_profile

from trainmux.ir import Multiplexing
from trainmux.planning._policy import Task, plain_order
from trainmux.planning.policies._body import FixedBody
from trainmux.planning.policies._gaps import Choice, Gap, find_gaps
from trainmux.planning.policies._layout import demand, lay_out
from trainmux.planning.policies._relieve import kept_again

PLENTY = 1 << 40


def body_of(seed: int, num_sub_arrays: int, multiplexing: Multiplexing) -> tuple[FixedBody, tuple[Gap, ...]]:
    """Of a random profile; a single sub-array takes turns with nobody, whatever is asked for."""
    if num_sub_arrays == 1:
        multiplexing = Multiplexing.TURNS
    task = Task((random_profile(seed),) * num_sub_arrays, multiplexing, PLENTY, PLENTY, 0.0)
    body = FixedBody(task, plain_order(task.profiles, multiplexing))
    return body, find_gaps(body.all_facts, with_static=True)


def peak_bytes(body: FixedBody, gaps: tuple[Gap, ...], choices: tuple[Choice, ...]) -> int:
    needs = demand(body, gaps, choices)
    assert needs is not None
    return needs.peak_bytes


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 60),
    num_sub_arrays=st.integers(1, 4),
    multiplexing=st.sampled_from(list(Multiplexing)),
    share=st.floats(0.0, 1.2),
    recomputes=st.booleans(),
)
def test_what_is_left_fits_and_is_needed(
    seed: int, num_sub_arrays: int, multiplexing: Multiplexing, share: float, recomputes: bool
) -> None:
    body, gaps = body_of(seed, num_sub_arrays, multiplexing)
    choices = tuple(
        Choice.RECOMPUTE if recomputes and gap.can_recompute and number % 3 == 0 else Choice.SWAP
        for number, gap in enumerate(gaps)
    )
    if demand(body, gaps, choices) is None:
        choices = (Choice.SWAP,) * len(gaps)
    least, most = peak_bytes(body, gaps, choices), int(body.needed().max())
    limit = least + int(share * max(0, most - least))
    kept = next(kept_again(body, gaps, choices, [limit]), None)
    left = choices if kept is None else kept
    assert kept != choices
    assert peak_bytes(body, gaps, left) <= limit
    for number, (before, after) in enumerate(zip(choices, left, strict=True)):
        assert after is before or (before is Choice.SWAP and after is Choice.KEEP)
        if after is Choice.SWAP:
            fewer = (*left[:number], Choice.KEEP, *left[number + 1 :])
            assert peak_bytes(body, gaps, fewer) > limit
    needs = demand(body, gaps, left)
    assert needs is not None
    assert lay_out(body, gaps, needs, limit) is not None


def test_sub_arrays_take_turns() -> None:
    """Alike sub-arrays keep about as much each, so that no peak is higher than the others."""
    body, gaps = body_of(3, 4, Multiplexing.TURNS)
    choices = (Choice.SWAP,) * len(gaps)
    least, most = peak_bytes(body, gaps, choices), int(body.needed().max())
    (kept,) = kept_again(body, gaps, choices, [(least + most) // 2])
    held = [0] * 4
    for gap, choice in zip(gaps, kept, strict=True):
        held[gap.sub_array] += gap.size_bytes * (choice is Choice.KEEP and gap.is_static)
    largest = max(gap.size_bytes for gap in gaps if gap.is_static)
    assert min(held) > 0
    assert max(held) - min(held) <= 2 * largest
