"""Several runs of `bench zico` as one document: pairs are measured on different days."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .zico import ROOMY
from .zico_results import pair_name

_BY_NAME = ("cases", "memory", "tracking", "regions", "host_view")


def merge(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All that the documents have; of what several have, the last. ``ValueError`` where devices differ.

    A pair that was not measured to its co-location is only there where no other run has it.
    """
    first, *later = documents
    merged = {**first}
    for document in later:
        device, other = merged["environment"]["device"], document["environment"]["device"]
        if device != other:
            raise ValueError(f"expected results of one device, got some of {device} and some of {other}")
        merged = {**merged, **_joined(merged, document)}
    return merged


def _joined(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, Any]:
    pairs = {tuple(pair["names"]): pair for pair in one["pairs"]}
    for pair in two["pairs"]:
        names = tuple(pair["names"])
        if names not in pairs or _is_whole(pair):
            pairs[names] = pair
    done = {(tuple(pair["names"]), row["way"]) for pair in pairs.values() for row in pair["ways"]}
    whole = {pair_name(names) for names, pair in pairs.items() if _is_whole(pair)}
    simulated = {tuple(row["names"]): row for row in (*one["simulated"], *two["simulated"])}
    failed = [
        row for row in (*one["failed"], *two["failed"]) if (tuple(row["names"]), row["way"]) not in done
    ]
    left_out = dict.fromkeys(
        what for what in (*one["left_out"], *two["left_out"]) if what.split(",")[0] not in whole
    )
    return {
        **{name: {**one[name], **two[name]} for name in _BY_NAME},
        "pairs": list(pairs.values()),
        "simulated": list(simulated.values()),
        "failed": failed,
        "left_out": list(left_out),
        "command": f"{one['command']}\n{two['command']}",
        "date": f"{one['date'].split(' to ')[0]} to {two['date']}",
        "environment": two["environment"],
        "settings": _settings([document for document in (one, two) if document["pairs"]] or [two]),
        "seconds": one["seconds"] + two["seconds"],
    }


def _settings(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the last one, with the shortest time that any took."""
    rows = [document["settings"] for document in documents]
    return {**rows[-1], "seconds": min(row["seconds"] for row in rows)}


def _is_whole(pair: Mapping[str, Any]) -> bool:
    return any(row["way"] == ROOMY for row in pair["ways"])
