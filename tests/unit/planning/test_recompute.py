"""Lineages by hand: chains, a diamond, what decisions do to them (Algorithms D to F), what is never done."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from figure6 import Builder

from trainmux.errors import PlanError
from trainmux.ir import ByteClass, Phase, Profile
from trainmux.planning._facts import facts_of
from trainmux.planning._recompute import Decision, Lineage, recomp_memory

F, B, U = Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE


def chain(
    names: str = "abc",
    seconds: Sequence[float] = (1.0, 2.0, 4.0),
    unrepeatable: str = "",
    reading_order: str | None = None,
) -> Profile:
    """x → a → b → c, each 10 bytes times its place; the backward pass reads c, b, a, or ``reading_order``."""
    builder = Builder()
    builder.tensor("x", ByteClass.BATCH, 1)
    for place, name in enumerate(names, start=1):
        builder.tensor(name, ByteClass.FEATURE_MAP, 10 * place)
    builder.tensor("g", ByteClass.GRADIENT_MAP, 1)
    for before, name, time in zip("x" + names, names, seconds, strict=False):
        builder.node(name, F, [before], [name], time, repeatable=name not in unrepeatable)
    builder.node("loss", F, [names[-1]], [], 1.0)
    builder.node("g", B, [], ["g"], 1.0)
    for name in reading_order or reversed(names):
        builder.node(f"g{name}", B, ["g", name], [], 1.0)
    return builder.profile("chain")


def lineage_of(profile: Profile) -> tuple[Lineage, dict[str, int]]:
    return Lineage(facts_of(profile)), {tensor.name: i for i, tensor in enumerate(profile.tensors)}


def test_a_chain_before_any_decision() -> None:
    lineage, at = lineage_of(chain())
    assert lineage.recomp_srcs(at["c"]) == {at["b"]}
    assert lineage.recomp_graph(at["c"]) == (2,)
    assert lineage.recomp_srcs(at["a"]) == frozenset()  # x is static
    assert [lineage.recomp_time(at[name]) for name in "abc"] == [1, 2, 4]
    assert [lineage.recomp_cnt(at[name]) for name in "abc"] == [1, 1, 1]
    assert [lineage.recompute_ratio(at[name]) for name in "abc"] == [10, 10, 7.5]
    assert lineage.recomp_memory(at["c"]) == 30
    assert lineage.deadline(at["b"]) == 6
    assert set(lineage.decisions.values()) == {Decision.KEEP}


def test_recomputing_the_middle_of_a_chain() -> None:
    """F: c reads b no longer but a, through b; b is counted once more for whoever reads it."""
    lineage, at = lineage_of(chain())
    changed = lineage.recompute(at["b"])
    assert changed == {at["a"], at["c"]}
    assert lineage.recomp_srcs(at["c"]) == {at["a"]}
    assert lineage.recomp_graph(at["c"]) == (1, 2)
    assert lineage.recomp_time(at["c"]) == lineage.total_recomp_time(at["c"]) == 6
    assert lineage.recompute_ratio(at["c"]) == 5
    # The two of them are there at once, b only until c is made.
    assert lineage.recomp_memory(at["c"]) == 50
    # F 17-19 corrected: a would be made for itself and for b, which is read earlier.
    assert lineage.recomp_cnt(at["a"]) == 2
    assert lineage.total_recomp_time(at["a"]) == 2
    assert lineage.recompute_ratio(at["a"]) == 5
    assert lineage.deadline(at["a"]) == 6


def test_recomputing_a_source_of_chosen_recomputations() -> None:
    """E: what was chosen grows through the new one, and the sources of that count once more."""
    lineage, at = lineage_of(chain())
    lineage.recompute(at["c"])
    lineage.recompute(at["b"])
    assert lineage.recomp_graph(at["c"]) == (1, 2)
    assert lineage.recomp_graph(at["b"]) == (1,)
    assert lineage.recomp_cnt(at["a"]) == 3
    assert lineage.deadline(at["a"]) == 5
    assert lineage.would_run(at["a"]) == {at["a"]: {0}, at["b"]: {0, 1}, at["c"]: {0, 1, 2}}
    changed = lineage.recompute(at["a"])
    assert changed == frozenset()
    assert [lineage.recomp_graph(at[name]) for name in "abc"] == [(0,), (0, 1), (0, 1, 2)]
    assert [lineage.recomp_time(at[name]) for name in "abc"] == [1, 3, 7]
    assert [lineage.recomp_srcs(at[name]) for name in "abc"] == [frozenset()] * 3


def test_a_recomputed_tensor_serves_those_that_come_while_it_is_there() -> None:
    """The backward pass reads b first and again last: c, made again in between, finds it there."""
    lineage, at = lineage_of(chain(reading_order="bcab"))
    lineage.recompute(at["b"])
    assert lineage.recomp_srcs(at["c"]) == {at["b"]}
    assert lineage.recomp_graph(at["c"]) == (2,)
    lineage.recompute(at["c"])
    assert lineage.recomp_graph(at["c"]) == (2,)


def test_the_same_for_one_chosen_before() -> None:
    """Algorithm E in the paper has no such test: c would be made from a though b is there."""
    lineage, at = lineage_of(chain(reading_order="bcab"))
    lineage.recompute(at["c"])
    lineage.recompute(at["b"])
    assert lineage.recomp_srcs(at["c"]) == {at["b"]}
    assert lineage.recomp_graph(at["c"]) == (2,)
    assert lineage.recomp_cnt(at["b"]) == 1


def test_a_source_that_is_gone_by_then_has_to_be_made_too() -> None:
    """The backward pass reads a first and never again: for b, read after that, it is no source."""
    lineage, at = lineage_of(chain(reading_order="acb"))
    assert lineage.recomp_graph(at["b"]) == (0, 1)
    assert lineage.recomp_srcs(at["b"]) == frozenset()
    assert lineage.recomp_time(at["b"]) == 3


def test_swapping_a_source_of_a_candidate() -> None:
    """F 2-16: b comes back only for its own use, after c's: c is made from a instead."""
    lineage, at = lineage_of(chain())
    assert lineage.swap(at["b"]) == {at["c"]}
    assert lineage.recomp_graph(at["c"]) == (1, 2)
    assert lineage.recomp_srcs(at["c"]) == {at["a"]}
    # 17-19 do not apply: nobody makes b again, so a counts as before.
    assert lineage.recomp_cnt(at["a"]) == 1


def test_swapping_a_source_of_a_chosen_recomputation() -> None:
    """A.5: the recomputation goes on reading it, and it comes back earlier. From then on it is there."""
    lineage, at = lineage_of(chain("abcd", (1.0, 2.0, 4.0, 8.0), reading_order="cdba"))
    lineage.recompute(at["c"])
    assert lineage.deadline(at["b"]) == 6
    lineage.swap(at["b"])
    assert lineage.recomp_srcs(at["c"]) == {at["b"]}
    assert lineage.recomp_graph(at["c"]) == (2,)
    # d is read after c: when c was dropped, d was to be made from c, gone by then, and so from b, back then.
    assert lineage.recomp_srcs(at["d"]) == {at["b"]}
    assert lineage.recomp_graph(at["d"]) == (2, 3)


def diamond() -> Profile:
    """x → a → t (temporary) → b and c → d; b and c come from the same temporary."""
    builder = Builder()
    builder.tensor("x", ByteClass.BATCH, 1)
    for name, size in (("a", 10), ("t", 5), ("b", 20), ("c", 30), ("d", 40)):
        builder.tensor(name, ByteClass.TEMPORARY if name == "t" else ByteClass.FEATURE_MAP, size)
    builder.node("a", F, ["x"], ["a"], 1.0)
    builder.node("t", F, ["a"], ["t"], 2.0, workspace=100)
    builder.node("b", F, ["t"], ["b"], 4.0)
    builder.node("c", F, ["t"], ["c"], 8.0)
    builder.node("d", F, ["b", "c"], ["d"], 16.0)
    for name in "dcba":
        builder.node(f"g{name}", B, [name], [], 1.0)
    return builder.profile("diamond")


def test_a_diamond() -> None:
    lineage, at = lineage_of(diamond())
    assert lineage.recomp_srcs(at["d"]) == {at["b"], at["c"]}
    assert lineage.recomp_graph(at["b"]) == (1, 2)
    assert lineage.recomp_srcs(at["b"]) == {at["a"]}
    lineage.recompute(at["d"])
    lineage.recompute(at["b"])
    assert lineage.recomp_graph(at["d"]) == (1, 2, 4)
    assert lineage.recomp_srcs(at["d"]) == {at["a"], at["c"]}
    lineage.recompute(at["c"])
    # The temporary is made once for both.
    assert lineage.recomp_graph(at["d"]) == (1, 2, 3, 4)
    assert lineage.recomp_time(at["d"]) == 2 + 4 + 8 + 16
    assert lineage.recomp_srcs(at["d"]) == {at["a"]}
    # a is read by the recomputations of d, c and b, all before its own use.
    assert lineage.recomp_cnt(at["a"]) == 4


def test_memory_of_a_recomputation() -> None:
    facts = facts_of(diamond())
    at = {tensor.name: i for i, tensor in enumerate(facts.profile.tensors)}
    assert recomp_memory(facts, at["b"], (1, 2)) == 5 + 100
    # t goes after c, b and c after d.
    assert recomp_memory(facts, at["d"], (2, 1, 4, 3)) == max(105, 5 + 20 + 30, 20 + 30 + 40)
    # A second output nobody wants goes at once.
    builder = Builder()
    builder.tensor("x", ByteClass.BATCH, 1)
    builder.tensor("a", ByteClass.FEATURE_MAP, 3)
    builder.tensor("mask", ByteClass.FEATURE_MAP, 7)
    builder.tensor("b", ByteClass.FEATURE_MAP, 8)
    builder.node("a", F, ["x"], ["a", "mask"])
    builder.node("b", F, ["a"], ["b"])
    builder.node("g", B, ["b", "a", "mask"])
    facts = facts_of(builder.profile("two outputs"))
    assert recomp_memory(facts, 3, (0, 1)) == 3 + 8
    assert recomp_memory(facts, 1, (0,)) == 10


def test_no_time_is_an_infinite_ratio() -> None:
    lineage, at = lineage_of(chain(seconds=(0.0, 0.0, 1.0)))
    assert lineage.recompute_ratio(at["a"]) == math.inf


def test_what_may_not_run_again() -> None:
    lineage, at = lineage_of(chain(unrepeatable="b"))
    assert not lineage.can_recompute(at["b"])
    assert lineage.recompute_ratio(at["b"]) == 0
    assert lineage.can_recompute(at["c"])
    with pytest.raises(PlanError, match="needs a lineage"):
        lineage.recompute(at["b"])
    with pytest.raises(PlanError, match="a feature map with a lineage was expected"):
        lineage.recomp_time(at["b"])
    # Without b, c cannot be made either; and one that was to be made from b keeps b from being dropped.
    assert lineage.swap(at["b"]) == {at["c"]}
    assert not lineage.can_recompute(at["c"])


def test_a_source_that_cannot_be_replaced_stays() -> None:
    lineage, at = lineage_of(chain("abcd", (1.0, 1.0, 1.0, 1.0), unrepeatable="a", reading_order="dcab"))
    lineage.recompute(at["c"])
    assert lineage.recomp_srcs(at["c"]) == {at["b"]}
    # b could be made for its own use only from a, which is gone by then.
    assert not lineage.can_recompute(at["b"])
    lineage, at = lineage_of(chain("abc", unrepeatable="a"))
    lineage.recompute(at["b"])
    assert lineage.would_run(at["a"]) is None


@pytest.mark.parametrize("is_updated_first", [False, True])
def test_a_parameter_is_not_read_after_its_update(is_updated_first: bool) -> None:
    builder = Builder()
    builder.tensor("x", ByteClass.BATCH, 1)
    builder.tensor("w", ByteClass.PARAMETER, 1)
    builder.tensor("a", ByteClass.FEATURE_MAP, 10)
    builder.tensor("g", ByteClass.GRADIENT, 1)
    builder.node("a", F, ["x", "w"], ["a"])
    builder.node("g", B, ["x"], ["g"])
    if is_updated_first:
        builder.node("update", U, ["g"], changes=["w"])
    builder.node("ga", B, ["a", "g"])
    if not is_updated_first:
        builder.node("update", U, ["g"], changes=["w"])
    lineage, at = lineage_of(builder.profile("updated"))
    assert lineage.can_recompute(at["a"]) is not is_updated_first


@pytest.mark.parametrize("changes_what", ["nothing", "buffer in the node", "input later", "itself later"])
def test_nothing_is_made_again_around_a_change(changes_what: str) -> None:
    builder = Builder()
    builder.tensor("x", ByteClass.BATCH, 1)
    builder.tensor("buffer", ByteClass.BUFFER, 1)
    builder.tensor("a", ByteClass.FEATURE_MAP, 10)
    builder.node("a", F, ["x"], ["a"], changes=["buffer"] if changes_what == "buffer in the node" else [])
    if changes_what == "input later":
        builder.node("x", F, [], changes=["x"])
    if changes_what == "itself later":
        builder.node("in place", F, [], changes=["a"])
    builder.node("ga", B, ["a"])
    lineage, at = lineage_of(builder.profile("changed"))
    assert lineage.can_recompute(at["a"]) is (changes_what == "nothing")


def test_decisions_fall_once() -> None:
    lineage, at = lineage_of(chain())
    lineage.swap(at["a"])
    with pytest.raises(PlanError, match=r"undecided feature map.*'a'"):
        lineage.swap(at["a"])
    with pytest.raises(PlanError, match="has none now"):
        lineage.recompute(at["a"])
    with pytest.raises(PlanError, match="undecided feature map"):
        lineage.swap(at["x"])
    with pytest.raises(PlanError, match="undecided feature map"):
        lineage.swap(99)


def test_taking_decisions_back_shortens_what_is_left() -> None:
    lineage, at = lineage_of(chain())
    for name in "cba":
        lineage.recompute(at[name])
    lineage.keep([at["b"]])
    assert lineage.decisions[at["b"]] is Decision.KEEP
    assert lineage.recomp_graph(at["c"]) == (2,)
    assert lineage.recomp_srcs(at["c"]) == {at["b"]}
    assert lineage.recomp_time(at["c"]) == 4
    assert lineage.recomp_graph(at["a"]) == (0,)
    assert lineage.deadline(at["b"]) == 5
