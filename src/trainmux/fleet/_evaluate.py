"""Fused evaluation: forward only, all members of a group at once, by a plan where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainmux.errors import BatchError, LossError
from trainmux.fleet._feed import BatchFeed, GroupFeed
from trainmux.fleet._group import Group
from trainmux.fleet._member import Member
from trainmux.fleet._runner import Batches, RowTraces
from trainmux.fleet._traces import Trace, TraceCache
from trainmux.tracing import BatchSpec, FlatBatch, LossFunction, plain_torch

EvaluateGroups = Callable[
    [Sequence[Group], Sequence[RowTraces], Sequence[GroupFeed], Batches], list[dict[str, Tensor]]
]
"""Metrics of each group, ``[width]`` each, on its batch, by ``id(group)``."""


def evaluate_fleet(
    evaluate: EvaluateGroups,
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
    known: dict[tuple[int, BatchSpec], RowTraces] = {}
    dtype = occupied[0].config.default_dtype
    num_samples = 0
    for index, batch in enumerate(loader):
        with plain_torch(dtype):
            feeds = feed.for_evaluation(batch, occupied, names)
            tensors = feed.tensors(feeds, occupied, names)
            parts = [feeds[id(group)] for group in occupied]
            found = []
            for group, part in zip(occupied, parts, strict=True):
                place = (id(group), part.example.spec)
                if place not in known:
                    known[place] = _forward_traces(group, traces, part.example, metric_fn, loss_of)
                found.append(known[place])
            for group in occupied:
                group.number_evaluation(index)
            size = 1
            results_of = evaluate(occupied, found, parts, tensors)
            for group, part, values in zip(occupied, parts, results_of, strict=True):
                size = part.example.tensors[0].shape[0] if part.example.tensors[0].dim() else 1
                for name, value in values.items():
                    weighted = _checked(name, value).to(torch.float64) * size
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


def _checked(name: str, value: Tensor) -> Tensor:
    if value.dim() != 1:
        raise LossError(
            f"metric {name!r}: expected a scalar per member, got shape {tuple(value.shape[1:])}; reduce it "
            "with .mean()"
        )
    return value


def _forward_traces(
    group: Group,
    traces: TraceCache,
    example: FlatBatch,
    metric_fn: LossFunction | None,
    loss_of: Callable[[Member], LossFunction],
) -> RowTraces:
    found: dict[str, tuple[Trace, list[int]]] = {}
    for row, slot in group.members:
        metric = metric_fn if metric_fn is not None else loss_of(slot.member)
        trace = traces.forward(slot.name, slot.member.model, metric, example)
        found.setdefault(trace.key, (trace, []))[1].append(row)
    return list(found.values())
