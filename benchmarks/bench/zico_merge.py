"""Several runs of `bench zico` as one document: pairs are measured on different days."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_BY_NAME = ("cases", "memory", "tracking", "regions", "host_view")
_AS_A_WHOLE = ("", "build", "co-located")
"""Ways that are no single one of a pair's: it is done, or these are not."""


def merge(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All that the documents have; of what several have, the last.

    But a pair that a run has only begun gives way to what another has of it. What failed or was left out in
    one run and is there from another is not told. ``ValueError`` where devices or settings differ.
    """
    first, *later = documents
    merged = {**first}
    for document in later:
        for what, one, two in (
            ("device", merged["environment"]["device"], document["environment"]["device"]),
            ("precision", merged["settings"]["precision"], document["settings"]["precision"]),
            ("lowering", merged["settings"]["lowering"], document["settings"]["lowering"]),
        ):
            if one != two:
                raise ValueError(f"expected results of one {what}, got some of {one} and some of {two}")
        merged |= _joined(merged, document)
    merged["failed"] = [row for row in merged["failed"] if not _has(merged, row["names"], row["way"])]
    left_out = [what.partition(", ") for what in dict.fromkeys(merged["left_out"])]
    merged["left_out"] = [
        f"{names}{comma}{way}" for names, comma, way in left_out if not _has(merged, names.split("+"), way)
    ]
    return merged


def _joined(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, Any]:
    dates = [*one["date"].split(" to "), two["date"]]
    pairs = {tuple(pair["names"]): pair for pair in one["pairs"]}
    for pair in two["pairs"]:
        names = tuple(pair["names"])
        known = pairs.get(names, {"ways": ()})
        if _is_whole(pair) or (not _is_whole(known) and len(pair["ways"]) >= len(known["ways"])):
            pairs[names] = pair
    simulated = {tuple(row["names"]): row for row in (*one["simulated"], *two["simulated"])}
    return {
        **{name: {**one[name], **two[name]} for name in _BY_NAME},
        "pairs": list(pairs.values()),
        "simulated": list(simulated.values()),
        "failed": [*one["failed"], *two["failed"]],
        "left_out": [*one["left_out"], *two["left_out"]],
        "command": f"{one['command']}\n{two['command']}",
        "date": f"{min(dates)} to {max(dates)}",
        "environment": two["environment"],
        "settings": _settings([document for document in (one, two) if document["pairs"]] or [two]),
        "seconds": one["seconds"] + two["seconds"],
    }


def _settings(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the last one, with the shortest time that any took."""
    rows = [document["settings"] for document in documents]
    return {**rows[-1], "seconds": min(row["seconds"] for row in rows)}


def _has(document: Mapping[str, Any], names: Sequence[str], way: str) -> bool:
    """Whether what failed or was left out for some jobs is there."""
    pairs = [pair for pair in document["pairs"] if set(names) <= set(pair["names"])]
    if way in _AS_A_WHOLE:
        return any(_is_whole(pair) for pair in pairs if len(names) == 1 or pair["names"] == list(names))
    if len(names) == 1:
        return names[0] in document.get(way.partition(", ")[0].replace(" ", "_"), ())
    if way == "memory":
        return any(row["names"] == list(names) for row in document["simulated"])
    return any(row["way"] == way for pair in pairs if pair["names"] == list(names) for row in pair["ways"])


def _is_whole(pair: Mapping[str, Any]) -> bool:
    return any(row["way"].startswith("co-located") for row in pair["ways"])
