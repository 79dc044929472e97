"""Names of members, and that no two members are the same."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from trainmux.errors import MemberError
from trainmux.fleet._member import Member


def unique_names(members: Sequence[Member]) -> list[str]:
    """A name for every member, given or made up; refuses members that cannot be told apart."""
    if not members:
        raise MemberError("expected at least one member, got none; pass a list of trainmux.Member")
    for member in members:
        if not isinstance(member, Member):
            raise MemberError(f"expected trainmux.Member objects, got {type(member).__name__}")
    if len({id(member) for member in members}) != len(members):
        raise MemberError("expected every member once, got the same Member object twice")
    given = [member.name for member in members if member.name is not None]
    for name in given:
        if given.count(name) > 1:
            raise MemberError(f"expected unique member names, got {name!r} twice; name them apart")
    names: list[str] = []
    for position, member in enumerate(members):
        taken = {*given, *names}
        names.append(member.name if member.name is not None else made_up_name(position, taken))
    owners: dict[int, tuple[str, Member]] = {}
    for name, member in zip(names, members, strict=True):
        for tensor in (member.model, *member.model.parameters()):
            owner = owners.setdefault(id(tensor), (name, member))
            if owner[1] is not member:
                check_apart(name, member, *owner)
    return names


def name_of_newcomer(member: Member, others: Mapping[str, Member], leaving: str | None = None) -> str:
    """The name of a member that joins ``others``, one of whom may be ``leaving`` for it.

    Refused: one that is among them, or has something in common with one of them.
    """
    if not isinstance(member, Member):
        raise MemberError(f"expected a trainmux.Member, got {type(member).__name__}")
    taken = set(others) - {leaving}
    name = member.name if member.name is not None else made_up_name(len(taken), taken)
    if name in taken:
        raise MemberError(f"expected a name that no other member has, got {name!r} again")
    for owner, other in others.items():
        if other is member:
            raise MemberError(f"member {name!r}: expected a new member, got one that is in the fleet already")
        check_apart(name, member, owner, other)
    return name


def made_up_name(number: int, taken: Collection[str]) -> str:
    """``member-N`` with the first free number from ``number`` on."""
    while f"member-{number}" in taken:
        number += 1
    return f"member-{number}"


def check_apart(name: str, member: Member, other_name: str, other: Member) -> None:
    """Refuse a member that has its model, or a parameter, in common with another."""
    if member.model is other.model:
        raise MemberError(
            f"member {name!r}: expected a model of its own, got the one of member {other_name!r}; "
            "copy.deepcopy the model"
        )
    owned = {id(parameter) for parameter in other.model.parameters()}
    if any(id(parameter) in owned for parameter in member.model.parameters()):
        raise MemberError(
            f"member {name!r}: expected parameters of its own, got some of member {other_name!r}; "
            "copy.deepcopy the model"
        )


def unknown_member(name: object, names: Sequence[str]) -> MemberError:
    """The error for a name that no member has."""
    return MemberError(
        f"expected the name of a member, got {name!r}; it was dropped or never there (members: "
        f"{', '.join(names) or 'none'})"
    )
