"""Traces, made once for all members that would give the same one."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from torch import nn

from trainmux.errors import TrainmuxError
from trainmux.tracing import (
    FlatBatch,
    LossFunction,
    Number,
    Reach,
    TracedGraph,
    TraceSettings,
    graph_constant,
    structure_of,
    tensor_digest,
    trace_forward,
    trace_joint,
)


def graph_key(traced: TracedGraph) -> str:
    """Equal for graphs that compute the same: code, input and output descriptions, constants."""
    digest = hashlib.sha256(traced.module.code.encode())
    digest.update(repr((traced.inputs, traced.outputs)).encode())
    for node in traced.module.graph.nodes:
        if node.op == "get_attr":
            digest.update(tensor_digest(graph_constant(traced.module, node)))
    return digest.hexdigest()


_MAX_TRACES = 64


@dataclass(frozen=True)
class Trace:
    """A member's graph, apart from the numbers of its code.

    ``key`` is equal for graphs that differ in such ``numbers`` only. They are kept as one ``graph``: its
    literals may be another member's.
    """

    graph: TracedGraph
    key: str
    numbers: tuple[Number, ...] = ()


class TraceCache:
    """Least recently used traces by signature of model and function, batch and purpose."""

    def __init__(self, settings: TraceSettings) -> None:
        self._settings = settings
        self._traces: OrderedDict[Hashable, Trace] = OrderedDict()
        self._graphs: WeakValueDictionary[str, TracedGraph] = WeakValueDictionary()

    def joint(self, name: str, model: nn.Module, loss: LossFunction, batch: FlatBatch) -> Trace:
        """Forward and backward of one training step."""
        return self._get("joint", name, model, loss, batch, trace_joint)

    def forward(self, name: str, model: nn.Module, metric: LossFunction, batch: FlatBatch) -> Trace:
        """Metrics in evaluation mode."""
        return self._get("forward", name, model, metric, batch, trace_forward)

    def _get(
        self,
        purpose: str,
        name: str,
        model: nn.Module,
        fn: LossFunction,
        batch: FlatBatch,
        trace: Callable[..., TracedGraph],
    ) -> Trace:
        key = (purpose, Reach(model, fn).signature, batch.spec)
        if key in self._traces:
            self._traces.move_to_end(key)
            return self._traces[key]
        try:
            graph = trace(model, fn, batch, self._settings)
        except TrainmuxError as error:
            error.add_note(f"while tracing member {name!r}")
            raise
        structure = structure_of(graph)
        known = self._graphs.setdefault(structure.key, graph)
        self._traces[key] = Trace(known, structure.key, structure.numbers)
        while len(self._traces) > _MAX_TRACES:
            self._traces.popitem(last=False)
        return self._traces[key]
