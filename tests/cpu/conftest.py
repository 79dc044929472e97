"""What tests on the CPU share: traces and steps that are made once for all tests which only use them."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx

from trainmux.engine import _units
from trainmux.fleet import _build, _other_steps, _planning, _program_store, _segment_runner, _traces
from trainmux.fusion import FusedGraph, fuse
from trainmux.profiling import KernelGraph, LinkRates, _measured
from trainmux.tracing import Reach, TracedGraph, graph_module

_MOST_KEPT = 64

_build._CPU_PATIENCE_S = math.inf  # a test that takes long must not begin to compile


class _Kept:
    """Least recently used values by key, for as long as the tests run."""

    def __init__(self) -> None:
        self._values: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._values:
            self._values[key] = make()
        self._values.move_to_end(key)
        while len(self._values) > _MOST_KEPT:
            self._values.popitem(last=False)
        return self._values[key]


_kept_traces, _kept_fused, _kept_steps, _kept_kernels, _kept_rates = (_Kept() for _ in range(5))
_TRACERS = (_traces.trace_joint, _traces.trace_forward)


def _fuse_once(
    traced: TracedGraph,
    width: int,
    batched: Sequence[bool],
    *,
    decompositions: Any,
    **options: Any,
) -> FusedGraph:
    """A copy of what was fused of this trace before, in the same way: steps are made out of it in place."""

    def make() -> tuple[TracedGraph, FusedGraph]:
        # The trace is kept with what was fused: its address is not given away again.
        return traced, fuse(traced, width, batched, decompositions=decompositions, **options)

    key = (id(traced), width, tuple(batched), decompositions is None, repr(options))
    _, found = _kept_fused.get(key, make)
    graph = fx.Graph()
    graph.output(graph.graph_copy(found.module.graph, {}))
    return replace(found, module=graph_module(found.module, graph))


@pytest.fixture
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fleets take the traces of earlier tests, by signature as they do within a fleet, and what was fused.

    For tests of what becomes of a fused graph, not of tracing. What a test puts in the place of a tracer or
    of ``fuse`` is used.
    """
    monkeypatch.setattr(_build, "fuse", _fuse_once)
    get_anew = _traces.TraceCache._get

    def get(
        cache: _traces.TraceCache,
        purpose: str,
        name: str,
        model: Any,
        fn: Any,
        batch: Any,
        how: Any,
        reach: Reach,
    ) -> _traces.Trace:
        tracer = how.func if isinstance(how, partial) else how  # for padded shapes, which `purpose` has

        def trace_once(model: Any, code: Any, batch: Any, settings: Any) -> Any:
            if code is not fn:  # with numbers that note what is done with them
                return how(model, code, batch, settings)
            key = (purpose, reach.signature, batch.spec, settings)
            return _kept_traces.get(key, lambda: how(model, fn, batch, settings))

        chosen = trace_once if tracer in _TRACERS else how
        return get_anew(cache, purpose, name, model, fn, batch, chosen, reach)

    monkeypatch.setattr(_traces.TraceCache, "_get", get)


@pytest.fixture
def built_once(
    traced_once: None, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Fleets take the steps of earlier tests, by all that a stored step is found by; traces too.

    For tests of what is done with steps, not of how they are made: none that patches what makes them, but for
    tracers and ``fuse``, whose stand-ins are used. How quickly memory is copied is measured once.
    """
    builder = _build.ProgramBuilder
    step, aten_step = builder.step, builder.aten_step

    def once(original: Callable[..., Any], self: Any, *given: Any) -> Any:
        def make() -> Any:
            built = original(self, *given)
            return replace(built, upgrade=None) if original is step else built

        config = self._config
        is_patched = _build.fuse is not _fuse_once
        if is_patched or (original is step and config.lowering == "inductor"):
            return make()
        units = (_units.SMALL, _units.MOST_TOGETHER)
        decisive = (original.__name__, *given, self._stacked_batch, config, self._shared, units)
        return _kept_steps.get(_program_store.step_key(self._traced, *decisive), make)

    monkeypatch.setattr(builder, "step", lambda self, *given: once(step, self, *given))
    monkeypatch.setattr(builder, "aten_step", lambda self, *given: once(aten_step, self, *given))
    folder = tmp_path_factory.getbasetemp() / "steps of all tests"
    monkeypatch.setattr(_program_store, "cache_folder", lambda: folder)

    read, probe = _other_steps.read_step, _measured.probe_link

    def read_once(program: Any) -> KernelGraph:
        # The program is kept with its kernels: its address is not given away again.
        _, found = _kept_kernels.get(id(program), lambda: (program, read(program)))
        return found

    def probe_once(device: torch.device) -> LinkRates:
        found: LinkRates = _kept_rates.get(device, lambda: probe(device))
        return found

    for module in (_planning, _segment_runner, _other_steps):
        monkeypatch.setattr(module, "read_step", read_once)
    monkeypatch.setattr(_measured, "probe_link", probe_once)
