"""Worked examples: µ-TWO's Figure 6, and what each baseline is known for on a short chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from figure6 import first, limit, rank_of, second
from steps import RING, TURNS, Builder, decide, plain_peak, prove, undecided

from trainmux.ir import ByteClass, Phase, Profile, Schedule

F, B, U = Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE
FIGURE6 = (first(), second())


def multiplexed(profiles: Sequence[Profile], limit_bytes: int | None = None) -> Schedule:
    """µ-TWO's schedule of a pair, proved."""
    limit_bytes = limit(profiles) if limit_bytes is None else limit_bytes
    made = decide("mutwo", profiles, RING, limit_bytes)
    assert made is not None
    prove(profiles, made, limit_bytes)
    return made


def names(profiles: Sequence[Profile], decisions: Sequence[object]) -> list[str]:
    return [profiles[each.sub_array].tensors[each.tensor].name for each in decisions]  # type: ignore[attr-defined]


def test_figure_6() -> None:
    """Two forward nodes fit in front of ∇W2, one in front of ∇W3: cases 2a, 2b, 3, then 1a."""
    profile, other = FIGURE6
    made = multiplexed(FIGURE6)
    swaps = dict(zip(names(FIGURE6, made.swaps), made.swaps, strict=True))
    cases = {name: swap.reason.split(":")[0] for name, swap in swaps.items()}
    assert cases == {"Z1": "case 2a", "Z2": "case 2b", "Z3": "case 3", "Z4": "case 1a"}
    stage = "∇Z5 ∇W5 ∇Z4 ∇W4 ∇Z3 Z1² ∇W3 ∇Z2 Z2² Z3² ∇W2 ∇Z1 ∇W1 update Z4² Z5²"
    labels = [FIGURE6[sub_array].nodes[rank].name + "²" * sub_array for sub_array, rank in made.order]
    assert " ".join(labels).startswith(stage)
    assert {name: swap.prefetch_prompt for name, swap in swaps.items()} == {
        "Z1": (1, rank_of(other, "Z2")),
        "Z2": (0, rank_of(profile, "∇Z3")),
        "Z3": (0, rank_of(profile, "∇Z4")),
        "Z4": (0, rank_of(profile, "∇W5")),
    }
    # Copies to the host take no time here, so each is released with the node after its last forward use.
    for layer in range(1, 5):
        swap = swaps[f"Z{layer}"]
        assert swap.offload_after == (0, rank_of(profile, f"Z{layer + 1}"))
        assert swap.release_before == (0, rank_of(profile, f"Z{layer + 2}" if layer < 4 else "R"))
    assert "hidden by 1 forward node of the other sub-array and 1 node of its own" in swaps["Z2"].reason
    assert "stall of 1 s" in swaps["Z3"].reason
    (again,) = made.recomputes
    assert names(FIGURE6, [again]) == ["R"]
    assert (again.nodes, again.before) == ((rank_of(profile, "R"),), (0, rank_of(profile, "∇Z4")))
    assert "a swap would stall for 6 s" in again.reason


@pytest.mark.parametrize(("recompute_seconds", "stall"), [(0.5, 1), (2.0, 3), (4.0, 6)])
def test_a_recomputation_is_taken_as_soon_as_it_costs_less_than_the_next_swap(
    recompute_seconds: float, stall: int
) -> None:
    """R instead of Z3, which would stall for 1, or of Z4, for 3, or of R itself, for 6."""
    profiles = (first(recompute_seconds=recompute_seconds), second())
    made = multiplexed(profiles)
    assert names(profiles, made.recomputes) == ["R"]
    assert f"a swap would stall for {stall} s" in made.recomputes[0].reason


def test_figure_6_decides_what_the_limit_asks_for_and_no_more() -> None:
    peak = plain_peak(FIGURE6, RING)
    assert multiplexed(FIGURE6, peak) == undecided(FIGURE6, RING)
    # The whole peak is in the first sub-array's last forward node: the second one is left alone.
    made = multiplexed(FIGURE6, peak - 5)
    assert [each.sub_array for each in (*made.swaps, *made.recomputes)] == [0]
    # Without the workspace of ∇Z5 nothing needs Z4 to leave any more once R has: it is taken back.
    nodes = list(FIGURE6[0].nodes)
    rank = rank_of(FIGURE6[0], "∇Z5")
    nodes[rank] = replace(nodes[rank], workspace_bytes=6)
    smaller = (replace(FIGURE6[0], nodes=tuple(nodes)), FIGURE6[1])
    made = multiplexed(smaller, limit(FIGURE6))
    assert set(names(smaller, made.swaps)) == {"Z1", "Z2", "Z3"}
    assert names(smaller, made.recomputes) == ["R"]
    assert decide("mutwo", FIGURE6, RING, limit(FIGURE6), host_bytes=25) is None


def chain(seconds: Sequence[float], copy_seconds: float, unrepeatable: str = "") -> Profile:
    """x → a → b → c → d, 10 bytes each; twelve idle nodes at 25 bytes; the backward pass reads d, c, b, a."""
    builder = Builder()
    builder.tensor("x", ByteClass.BATCH, 1)
    for before, name, time in zip("xabc", "abcd", seconds, strict=True):
        builder.tensor(name, ByteClass.FEATURE_MAP, 10, copy_seconds, copy_seconds)
        builder.node(name, F, [before], [name], time, repeatable=name not in unrepeatable)
    for number in range(12):
        builder.node(f"idle {number}", F, [], [], 1.0, workspace=25 if number == 6 else 0)
    for name in "dcba":
        builder.node(f"∇{name}", B, [name], [], 1.0)
    return builder.profile("chain")


def decided(policy: str, profile: Profile, limit_bytes: int) -> tuple[set[str], set[str]] | None:
    """Names of what is swapped and of what is recomputed within a limit."""
    made = decide(policy, [profile], TURNS, limit_bytes)
    if made is None:
        return None
    prove([profile], made, limit_bytes)
    return set(names([profile], made.swaps)), set(names([profile], made.recomputes))


def test_recomputation_goes_by_bytes_per_second_and_through_what_is_dropped() -> None:
    profile = chain((4.0, 1.0, 2.0, 8.0), copy_seconds=100.0)
    peak = plain_peak([profile], TURNS)
    assert decided("recompute_only", profile, peak - 10) == (set(), {"b"})
    # With b gone, c takes 3 s and not 2: still less than a.
    assert decided("recompute_only", profile, peak - 20) == (set(), {"b", "c"})
    assert decided("recompute_only", chain((1.0,) * 4, 1.0, unrepeatable="abcd"), peak - 10) is None


def test_capuchin_swaps_what_is_hidden_and_recomputes_what_is_cheaper() -> None:
    peak = plain_peak([chain((1.0,) * 4, 1.0)], TURNS)
    for limit_bytes, num_away in ((peak - 10, 1), (peak - 30, 3)):
        quick = decided("capuchin", chain((1.0,) * 4, copy_seconds=0.5), limit_bytes)
        slow = decided("capuchin", chain((1.0,) * 4, copy_seconds=50.0), limit_bytes)
        assert quick is not None
        assert slow is not None
        assert (len(quick[0]), len(quick[1])) == (num_away, 0)
        assert (len(slow[0]), len(slow[1])) == (0, num_away)


def test_swapping_alone_fetches_back_one_layer_ahead() -> None:
    """As in vDNN: given back when the next node has run, fetched when the layer before begins."""
    profile = chain((1.0,) * 4, copy_seconds=0.5)
    made = decide("swap_only", [profile], TURNS, plain_peak([profile], TURNS) - 10)
    assert made is not None
    (swap,) = made.swaps
    assert profile.tensors[swap.tensor].name == "a"
    assert swap.offload_after == (0, rank_of(profile, "b"))
    assert swap.release_before == (0, rank_of(profile, "d"))
    assert swap.prefetch_prompt == (0, rank_of(profile, "∇b"))


@pytest.mark.parametrize("policy", ["recompute_only", "capuchin", "mutwo", "auto"])
@pytest.mark.parametrize(
    ("changed", "may_repeat"),
    [
        ("nothing", True),
        ("parameter behind the use", True),
        ("parameter before the use", False),
        ("buffer in the node", False),
        ("input later", False),
        ("itself later", False),
    ],
)
def test_nothing_is_made_again_from_or_around_what_has_changed(
    policy: str, changed: str, may_repeat: bool
) -> None:
    builder = Builder()
    builder.tensor("x", ByteClass.BATCH, 1)
    builder.tensor("w", ByteClass.PARAMETER, 1, 1e3, 1e3)
    builder.tensor("buffer", ByteClass.BUFFER, 1, 1e3, 1e3)
    builder.tensor("a", ByteClass.FEATURE_MAP, 10, 1e3, 1e3)
    builder.tensor("g", ByteClass.GRADIENT, 1)
    builder.node("a", F, ["x", "w"], ["a"], changes=["buffer"] if changed == "buffer in the node" else [])
    if changed in ("input later", "itself later"):
        builder.node("in place", F, [], changes=["x" if changed == "input later" else "a"])
    builder.node("idle", F, [], [], workspace=50)
    builder.node("g", B, ["x"], ["g"])
    if changed == "parameter before the use":
        builder.node("update", U, ["g"], changes=["w"])
    builder.node("∇a", B, ["a", "g"])
    if changed == "parameter behind the use":
        builder.node("update", U, ["g"], changes=["w"])
    profile = builder.profile("changed")
    found = decided(policy, profile, plain_peak([profile], TURNS) - 5)
    if may_repeat:
        assert found == (set(), {"a"})
    else:
        assert found == (None if policy == "recompute_only" else ({"a"}, set()))
