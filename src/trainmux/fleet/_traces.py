"""Traces, made once for all members that would give the same one."""

from __future__ import annotations

import functools
import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from weakref import WeakValueDictionary

from torch import nn

from trainmux.errors import TrainmuxError
from trainmux.fleet._slots import Slot
from trainmux.fleet._watch import QuickLook
from trainmux.runtime import process_lock
from trainmux.tracing import (
    FlatBatch,
    LossFunction,
    Number,
    NumberForms,
    Numbers,
    Place,
    Reach,
    Shape,
    TracedGraph,
    TraceSettings,
    follow,
    graph_constant,
    same_numbers,
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
_MAX_KNOWN = 4
"""Members that were traced as they are, of those that differ in numbers only; and metrics of one member."""

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


@dataclass(frozen=True)
class Evaluated:
    """The trace of a metric on a member, and what code could reach then: to walk there takes milliseconds."""

    metric: LossFunction
    look: QuickLook
    trace: Trace


@dataclass
class _Family:
    """Members whose code is the same but for numbers: some traced as they are, and forms for others.

    ``tried`` has the sets of places at which numbers were followed, and how many members were known then.
    """

    known: list[tuple[Trace, Numbers]] = field(default_factory=list)
    forms: list[tuple[Trace, NumberForms]] = field(default_factory=list)
    tried: dict[frozenset[Place], float] = field(default_factory=dict)

    def note(self, trace: Trace, numbers: Numbers) -> None:
        """Remember the trace of a member that was made as it is."""
        if len(self.known) < _MAX_KNOWN:
            self.known.append((trace, numbers))

    def found(self, numbers: Numbers) -> Trace | None:
        """The trace of a member with these numbers, if that is known."""
        for like, forms in self.forms:
            found = forms.numbers(numbers)
            if found is not None:
                return replace(like, numbers=found)
        return None

    def followed(
        self,
        numbers: Numbers,
        trace: Callable[[LossFunction], TracedGraph],
        code: LossFunction,
        reach: Reach,
    ) -> Trace | None:
        """The trace of a member with these numbers, by ``trace`` once; ``None`` if that failed, or would."""
        others = self.known[0][1] if self.known else numbers
        differing = {place for place, number in numbers.items() if number != others[place]}
        places = frozenset(differing.union(*(forms.places for _, forms in self.forms)))
        if len(self.known) <= self.tried.get(places, 0):
            return None
        forms = follow(trace, code, reach, places, numbers)
        if forms is None:
            self.tried[places] = math.inf
            return None
        self.tried[places] = len(self.known)  # a member that comes to be known later may be more like it
        for like, given in self.known:
            found = forms.numbers(given) if forms.key == like.key else None
            if found is not None:
                if not same_numbers(found, like.numbers):
                    return None
                self.forms.append((like, forms))
                return self.found(numbers)
        return None


def _widened(trace: Tracer, wider: Mapping[str, Shape]) -> Tracer:
    return functools.partial(trace, wider=wider) if wider else trace


class TraceCache:
    """Traces by signature of model and function, batch and purpose; the last ones that were made."""

    def __init__(self, settings: TraceSettings) -> None:
        self._settings = settings
        self._traces: OrderedDict[Hashable, Trace] = OrderedDict()
        self._families: OrderedDict[Hashable, _Family] = OrderedDict()
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
        model, key = slot.member.model, (id(metric), batch.spec)
        known = slot.evaluated.get(key)
        if known is not None and known.metric is metric and known.look.is_current():
            return known.trace
        purpose, tracer = ("forward", *slot.wider.items()), _widened(trace_forward, slot.wider)
        reach = Reach(model, metric)
        look = QuickLook(reach)
        trace = self._get(purpose, slot.name, model, metric, batch, tracer, reach)
        if len(slot.evaluated) >= _MAX_KNOWN:
            slot.evaluated.clear()
        if look.is_enough:
            slot.evaluated[key] = Evaluated(metric, look, trace)
        return trace

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
        found = self._traces.get(key)
        if found is not None:
            return found
        with process_lock:  # members may be prepared by another thread
            if key in self._traces:
                return self._traces[key]
            outline, numbers = reach.apart_from_numbers()
            family = self._families.get((purpose, outline, batch.spec), _Family())

            def traced(code: LossFunction) -> TracedGraph:
                return trace(model, code, batch, self._settings)

            try:
                found = family.found(numbers) or family.followed(numbers, traced, fn, reach)
                if found is None:
                    graph = traced(fn)
                    structure = structure_of(graph)
                    known = self._graphs.setdefault(structure.key, graph)
                    found = Trace(known, structure.key, structure.numbers)
                    family.note(found, numbers)
            except TrainmuxError as error:
                error.add_note(f"while tracing member {name!r}")
                raise
            # The spec may be another one by now: of a batch whose text is read.
            self._families[purpose, outline, batch.spec] = family
            self._traces[key] = found
            for kept in (self._families, self._traces):
                while len(kept) > _MAX_TRACES:
                    kept.popitem(last=False)
            return found
