"""Fused evaluation: forward only, all members of a group at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainmux.errors import BatchError, LossError
from trainmux.fleet._batches import BatchFeed, GroupFeed
from trainmux.fleet._group import Group
from trainmux.fleet._member import Member
from trainmux.fleet._traces import Trace, TraceCache
from trainmux.tracing import BatchSpec, FlatBatch, LossFunction


def evaluate_fleet(
    groups: Sequence[Group],
    names: Sequence[str],
    traces: TraceCache,
    feed: BatchFeed,
    loader: Iterable[Any],
    metric_fn: LossFunction | None,
    loss_of: Callable[[Member], LossFunction],
) -> dict[str, dict[str, float]]:
    """Means over samples, by member and metric. Sums stay on the device until the loader is exhausted."""
    occupied = [group for group in groups if group.members]
    sums: dict[tuple[int, str], Tensor] = {}
    known: dict[tuple[int, BatchSpec], list[tuple[Trace, list[int]]]] = {}
    num_samples = 0
    for batch in loader:
        feeds = feed.for_evaluation(batch, occupied, names)
        tensors = feed.tensors(feeds, occupied, names)
        size = 1
        for group in occupied:
            part = feeds[id(group)]
            place = (id(group), part.example.spec)
            if place not in known:
                known[place] = _forward_traces(group, traces, part.example, metric_fn, loss_of)
            values = _evaluate_group(group, known[place], part, tensors[id(group)])
            size = part.example.tensors[0].shape[0] if part.example.tensors[0].dim() else 1
            for name, value in values.items():
                if value.dim() != 1:
                    raise LossError(
                        f"metric {name!r}: expected a scalar per member, got shape {tuple(value.shape[1:])}; "
                        "reduce it with .mean()"
                    )
                weighted = value.to(torch.float64) * size
                key = (id(group), name)
                sums[key] = sums[key] + weighted if key in sums else weighted
        num_samples += size
    if num_samples == 0:
        raise BatchError("expected at least one batch to evaluate on, got an empty loader")
    results: dict[str, dict[str, float]] = {name: {} for name in names}
    for group in occupied:
        for (owner, metric_name), total in sums.items():
            if owner != id(group):
                continue
            means = (total / num_samples).tolist()
            for row, slot in group.members:
                results[slot.name][metric_name] = means[row]
    return results


def _forward_traces(
    group: Group,
    traces: TraceCache,
    example: FlatBatch,
    metric_fn: LossFunction | None,
    loss_of: Callable[[Member], LossFunction],
) -> list[tuple[Trace, list[int]]]:
    """Distinct traces with the rows they are for: members that train alike may differ in evaluation."""
    found: dict[str, tuple[Trace, list[int]]] = {}
    for row, slot in group.members:
        metric = metric_fn if metric_fn is not None else loss_of(slot.member)
        trace = traces.forward(slot.name, slot.member.model, metric, example)
        found.setdefault(trace.key, (trace, []))[1].append(row)
    return list(found.values())


def _evaluate_group(
    group: Group, found: Sequence[tuple[Trace, list[int]]], part: GroupFeed, tensors: Sequence[Tensor]
) -> dict[str, Tensor]:
    merged: dict[str, Tensor] = {}
    for trace, rows in found:
        values = group.evaluate(
            trace.graph, (trace.key, part.example.spec), tensors, stacked_batch=part.stacked
        )
        for name, value in values.items():
            if name not in merged:
                merged[name] = value
            else:
                index = torch.tensor(rows, device=value.device)
                merged[name] = merged[name].index_copy(0, index, value.index_select(0, index))
    return merged
