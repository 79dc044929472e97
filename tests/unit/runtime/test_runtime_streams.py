"""Streams are lent again and again, never to two at a time while there are others."""

from __future__ import annotations

import itertools

from trainmux.runtime._streams import StreamLender


class Owner:
    pass


def lender_of(num_streams: int) -> StreamLender:
    streams = itertools.cycle(range(num_streams))
    return StreamLender(lambda: next(streams))


def test_owners_have_streams_of_their_own_while_there_are_any() -> None:
    lender = lender_of(32)
    assert len({lender.lend(Owner()) for _ in range(100)}) == 1  # one after another
    owners = [Owner() for _ in range(32)]
    assert sorted(lender.lend(owner) for owner in owners) == list(range(32))
    assert lender.lend(Owner()) in range(32)


def test_the_stream_of_one_that_is_gone_is_lent_again() -> None:
    lender = lender_of(32)
    first, second = Owner(), Owner()
    stream, other = lender.lend(first), lender.lend(second)
    del first
    third, fourth = Owner(), Owner()
    assert lender.lend(third) == stream
    lender.take_back(second)
    assert lender.lend(fourth) == other


def test_there_are_as_many_workspaces_as_owners_that_used_matrices_at_a_time() -> None:
    lender = lender_of(32)
    plain = [Owner() for _ in range(2)]
    seen, used = {lender.lend(owner) for owner in plain}, set()
    for _ in range(20):
        others, users = [Owner() for _ in range(3)], [Owner() for _ in range(2)]
        for other, user in zip(others, [*users, None], strict=True):  # in any order
            seen.add(lender.lend(other))
            if user is not None:
                used.add(lender.lend(user, uses_matrices=True))
    assert len(used) == 2
    assert len(seen | used) == 7


def test_where_no_stream_is_left_any_is_lent() -> None:
    lender = lender_of(4)
    owners = [Owner() for _ in range(4)]
    streams = [lender.lend(owner, uses_matrices=True) for owner in owners]
    lender.take_back(owners[2])
    plain = Owner()
    assert lender.lend(plain) == streams[2]
