"""Traces, made once for all members that would give the same one."""

from __future__ import annotations

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from weakref import WeakValueDictionary

from torch import nn

from trainmux.errors import TrainmuxError
from trainmux.fleet._slots import Slot
from trainmux.tracing import (
    FlatBatch,
    LossFunction,
    Number,
    Reach,
    Shape,
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

Tracer = Callable[..., TracedGraph]


@dataclass(frozen=True)
class Trace:
    """A member's graph, apart from the numbers of its code.

    ``key`` is equal for graphs that differ in such ``numbers`` only. They are kept as one ``graph``: its
    literals may be another member's.
    """

    graph: TracedGraph
    key: str
    numbers: tuple[Number, ...] = ()


def _widened(trace: Tracer, wider: Mapping[str, Shape]) -> Tracer:
    return functools.partial(trace, wider=wider) if wider else trace


class TraceCache:
    """Least recently used traces by signature of model and function, batch and purpose."""

    def __init__(self, settings: TraceSettings) -> None:
        self._settings = settings
        self._traces: OrderedDict[Hashable, Trace] = OrderedDict()
        self._graphs: WeakValueDictionary[str, TracedGraph] = WeakValueDictionary()

    def joint(
        self,
        name: str,
        model: nn.Module,
        loss: LossFunction,
        batch: FlatBatch,
        wider: Mapping[str, Shape] = MappingProxyType({}),
        reach: Reach | None = None,
    ) -> Trace:
        """Forward and backward of one training step, with parameters padded to ``wider`` shapes.

        ``reach`` is of the model and the loss as they are now, where the caller has it.
        """
        purpose, reach = ("joint", *wider.items()), reach or Reach(model, loss)
        return self._get(purpose, name, model, loss, batch, _widened(trace_joint, wider), reach)

    def forward(self, slot: Slot, metric: LossFunction, batch: FlatBatch) -> Trace:
        """Metrics in evaluation mode."""
        purpose, trace = ("forward", *slot.wider.items()), _widened(trace_forward, slot.wider)
        model = slot.member.model
        return self._get(purpose, slot.name, model, metric, batch, trace, Reach(model, metric))

    def _get(
        self,
        purpose: Hashable,
        name: str,
        model: nn.Module,
        fn: LossFunction,
        batch: FlatBatch,
        trace: Tracer,
        reach: Reach,
    ) -> Trace:
        key = (purpose, reach.signature, batch.spec)
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
