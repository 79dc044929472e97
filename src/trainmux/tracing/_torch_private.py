"""Every private torch API that tracing needs, in one place (torch 2.11 to 2.13).

Nothing else in the package imports these names; ``tests/cpu/tracing/test_torch_private.py`` holds
each of them to what we rely on.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch._decomp.decompositions
import torch._higher_order_ops.effects
import torch.utils._pytree as pytree
import torch.utils.checkpoint
from torch import Tensor, fx
from torch._C import DispatchKey
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch import config as functorch_config
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx import _symbolic_trace
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.proxy_tensor import make_fx as _make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import CheckpointPolicy

__all__ = [
    "DATA_DEPENDENT_ERRORS",
    "CheckpointPolicy",
    "FakeTensor",
    "FakeTensorMode",
    "checkpoint_regions",
    "functionalized",
    "graph_module",
    "has_autocast",
    "has_function_modes",
    "last_node",
    "layer_parameters",
    "make_fx",
    "make_piece",
    "min_cut",
    "native_composite",
    "nodes_after",
    "override_composites",
    "recorded_frames",
    "recurrent_layers",
    "refuses_generators",
    "static_fake_mode",
    "traced_operator",
    "tracer_graph",
    "tracing_flags",
    "vmap_without_loops",
]

DATA_DEPENDENT_ERRORS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)


def make_fx(function: Callable[..., Any], **options: Any) -> Callable[..., fx.GraphModule]:
    """Torch's tracer. The module that it makes is written as Python when it is first called, if ever.

    Most graphs are only read and rewritten, and to write one with thousands of nodes takes a second.
    """
    trace = _make_fx(function, **options)

    def traced(*examples: Any) -> fx.GraphModule:
        with _use_lazy_graph_module(True):
            return trace(*examples)

    return traced


def make_piece(function: Callable[..., Any], **options: Any) -> Callable[..., fx.GraphModule]:
    """``make_fx`` for operators alone, no code of a user: nodes do not say what called them."""
    trace = make_fx(function, _disable_torch_fn_metadata_mode=True, **options)

    def traced(*examples: Any) -> fx.GraphModule:
        before, _thread.traces_a_piece = _thread.traces_a_piece, True
        try:
            return trace(*examples)
        finally:
            _thread.traces_a_piece = before

    return traced


class _Thread(threading.local):
    traces_a_piece = False


_thread = _Thread()
_new_patcher = _symbolic_trace._new_patcher


class _NoPatches(_symbolic_trace._Patcher):
    def patch(self, *args: Any, **kwargs: Any) -> None: ...

    def patch_method(self, *args: Any, **kwargs: Any) -> None: ...

    def visit_once(self, thing: object) -> bool:
        return False


@contextmanager
def _patcher_of_thread() -> Iterator[_symbolic_trace._Patcher]:
    """While torch traces, it switches ``Module.__call__`` and others, for all threads.

    A piece calls no modules, and to change the base of thousands of classes takes longer than to trace it.
    """
    if _thread.traces_a_piece:
        yield _NoPatches()
    else:
        with _new_patcher() as patcher:
            yield patcher


_symbolic_trace._new_patcher = _patcher_of_thread


def graph_module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A module of ``graph``, with what it refers to from ``root``; it is written when it is first called."""
    with _use_lazy_graph_module(True):
        return _make_graph_module(root, graph)


def has_autocast() -> bool:
    """Whether autocast is on for any kind of device."""
    return torch._C._is_any_autocast_enabled()


def has_function_modes() -> bool:
    """Whether calls of torch's functions are intercepted: a default device does that, too."""
    return torch._C._len_torch_function_stack() > 0


def static_fake_mode() -> FakeTensorMode:
    """A mode for graphs that a compiler will see: it wants a shape environment, though shapes are fixed."""
    return FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)


def functionalized(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` with every mutation turned into a new value, as seen by a tracer outside of it."""

    def run(*args: Tensor) -> Any:
        with FunctionalTensorMode():
            wrapped = pytree.tree_map_only(Tensor, FunctionalTensor.to_functional, args)
            out = fn(*wrapped)

        def unwrap(value: FunctionalTensor) -> Tensor:
            torch._sync(value)  # type: ignore[attr-defined]
            return torch._from_functional_tensor(value.elem)

        return pytree.tree_map_only(FunctionalTensor, unwrap, out)

    return run


@contextmanager
def recorded_frames(wanted: Callable[[str], bool]) -> Iterator[None]:
    """While active, nodes record the frames of files that are ``wanted``; torch keeps ``forward`` only.

    Many nodes have one line's frames, which are written once, and only those that are wanted.
    """
    is_wanted: dict[str, bool] = {}
    known: dict[tuple[tuple[str, int, str], ...], _Frames] = {}

    class Captured:
        @staticmethod
        def extract() -> type[Captured]:
            return Captured

        @staticmethod
        def summary() -> _Frames:
            found: list[tuple[str, int, str]] = []
            for frame, line in traceback.walk_stack(sys._getframe(1)):
                file = frame.f_code.co_filename
                if file not in is_wanted:
                    is_wanted[file] = wanted(file)
                if is_wanted[file]:
                    found.append((file, line, frame.f_code.co_name))
            key = tuple(reversed(found))
            if key not in known:
                known[key] = _Frames(traceback.FrameSummary(*frame) for frame in key)
            return known[key]

    def keep(self: Any, frames: _Frames) -> _Frames:
        return frames

    with (
        mock.patch.object(fx.proxy, "CapturedTraceback", Captured),
        mock.patch.object(fx.proxy.TracerBase, "_filter_traceback_frames", keep),
    ):
        yield


class _Frames(traceback.StackSummary):
    """Frames that are written down once."""

    _lines: list[str] | None = None

    def format(self, **options: Any) -> list[str]:
        if self._lines is None:
            self._lines = super().format(**options)
        return self._lines


def _no_effects(op: Any) -> bool:
    return False


@contextmanager
def tracing_flags() -> Iterator[None]:
    """Tell model code that looks for it (Hugging Face's mask builders do) that it is being traced.

    The python dispatcher makes torch use its own decompositions of composite operators: recurrent
    layers become cell steps instead of a call into a vendor library.
    """
    with ExitStack() as stack:
        stack.enter_context(enable_python_dispatcher())
        # torch.backends.mkldnn.flags would do, but warns about devices that are not there.
        stack.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
        torch._C._set_mkldnn_enabled(False)
        stack.enter_context(mock.patch.object(torch.compiler, "_is_compiling_flag", True))
        # Checks of linear algebra would otherwise be threaded through the graph with tokens.
        stack.enter_context(mock.patch.object(torch._higher_order_ops.effects, "has_effects", _no_effects))
        yield


@contextmanager
def override_composites(table: Mapping[OpOverload, Callable[..., Any]]) -> Iterator[None]:
    """Replace the decomposition of composite operators while tracing."""
    key = DispatchKey.CompositeImplicitAutograd
    saved = {op: op.py_kernels.get(key) for op in table}
    try:
        for op, implementation in table.items():
            op.py_kernels[key] = implementation
            op._dispatch_cache.clear()
        yield
    finally:
        for op, original in saved.items():
            if original is None:
                op.py_kernels.pop(key, None)
            else:
                op.py_kernels[key] = original
            op._dispatch_cache.clear()


@contextmanager
def recurrent_layers(
    lstm_cell: Callable[..., tuple[Tensor, Tensor]], stack_layers: Callable[..., Any]
) -> Iterator[None]:
    """While active, torch's decomposition of recurrent layers uses these for a step and for the layers."""
    decompositions = torch._decomp.decompositions
    with (
        mock.patch.object(decompositions, "lstm_cell", lstm_cell),
        mock.patch.object(decompositions, "_rnn_helper", stack_layers),
    ):
        yield


def layer_parameters(parameters: Any, hidden: Any, layer: int, bidirectional: bool) -> tuple[Any, ...]:
    """A recurrent layer's weights and state, forwards and backwards, out of torch's flat lists."""
    found: tuple[Any, ...] = torch._decomp.decompositions.params_hiddens(
        parameters, hidden, layer, bidirectional
    )
    return found


def native_composite(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Torch's own decomposition of a composite operator, past an override of it."""
    return op._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def tracer_graph() -> fx.Graph:
    """The graph that the innermost running ``make_fx`` writes to."""
    mode = get_proxy_mode()
    if mode is None:
        raise RuntimeError("expected to run inside make_fx, got no active tracer")
    graph = mode.tracer.graph
    assert isinstance(graph, fx.Graph)
    return graph


def refuses_generators(error: Exception) -> bool:
    """Whether a tracer stopped at a ``torch.Generator``: that of torch 2.11 has no nodes with one."""
    return isinstance(error, NotImplementedError) and str(torch._C.Generator) in str(error)


def traced_operator(error: Exception) -> OpOverload | None:
    """The operator that was being traced when an error came up."""
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        operator = frame.f_locals.get("func")
        found = operator if isinstance(operator, OpOverload) else found
    return found


@contextmanager
def vmap_without_loops() -> Iterator[None]:
    """``torch.vmap`` raises where it would loop over an operator without a rule (it warns on stderr only)."""
    functorch: Any = torch._C._functorch
    was_enabled = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(was_enabled)


def last_node(graph: fx.Graph) -> fx.Node:
    """The node that was added last."""
    node: fx.Node = next(iter(reversed(graph.nodes)))
    return node


def copy_node(graph: fx.Graph, node: fx.Node, place: Callable[[fx.Node], Any]) -> fx.Node:
    """Copy a node from another graph to where ``graph`` inserts; ``place`` says what its inputs are there.

    Torch 2.11 looks for a name that is free from the first number on, each time: too long in a large graph.
    """
    names = graph._graph_namespace
    if node.name in names._used_names:
        base, _, number = node.name.rpartition("_")
        if number.isdecimal():
            names._base_count[node.name] = names._base_count.get(base, 0)
    return graph.node_copy(node, place)


def nodes_after(graph: fx.Graph, last: fx.Node) -> list[fx.Node]:
    """The nodes added to ``graph`` since ``last`` was its last one."""
    added = []
    for node in reversed(graph.nodes):
        if node is last:
            break
        added.append(node)
    return added[::-1]


@contextmanager
def checkpoint_regions(on_region: Callable[[list[fx.Node]], None]) -> Iterator[None]:
    """Run ``torch.utils.checkpoint`` regions plainly and hand their forward nodes to ``on_region``.

    Tracing the real thing would record the recomputation with draws of its own; the split into
    forward and backward recomputes instead, by the marks that ``on_region`` sets.
    """

    @contextmanager
    def region() -> Iterator[None]:
        graph = tracer_graph()
        last = last_node(graph)
        yield
        on_region(nodes_after(graph, last))

    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        with region():
            yield

    class PlainCheckpoint:
        @staticmethod
        def apply(run_function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
            with region():
                return run_function(*args)

    module = torch.utils.checkpoint
    with (
        mock.patch.object(module, "_checkpoint_without_reentrant_generator", generator),
        mock.patch.object(module, "CheckpointFunction", PlainCheckpoint),
    ):
        yield


def min_cut(
    joint: fx.GraphModule, num_forward_outputs: int, static_inputs: Sequence[int]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward modules of ``joint``, saving the fewest bytes between them.

    ``joint``'s placeholders must be called ``primals_*`` and ``tangents_*``; ``static_inputs`` are the
    positions of those that live on anyway (parameters), whose saving costs nothing.
    """
    # It imports torch's compilers, which takes longer than all of this package: not before it is needed.
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    with functorch_config.patch(cse=True), _use_lazy_graph_module(True):
        forward, backward = min_cut_rematerialization_partition(
            joint,
            None,
            num_fwd_outputs=num_forward_outputs,
            static_lifetime_input_indices=list(static_inputs),
        )
    return forward, backward
