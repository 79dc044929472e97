"""Every private torch API that tracing needs, in one place (torch 2.11 to 2.15).

Nothing else in the package imports these names; ``tests/cpu/tracing/test_torch_private.py`` holds
each of them to what we rely on.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
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
from torch._functorch.predispatch import lazy_load_decompositions
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch._subclasses.fake_tensor import FakeTensorMode as _FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx import _symbolic_trace
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import (
    PythonKeyTracer,
    _MakefxTracer,
    get_proxy_mode,
    get_proxy_slot,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy

from trainmux.runtime import process_lock

__all__ = ["CheckpointPolicy", "FakeTensor"]  # torch's own, used under these names

_fake_tensor_log = logging.getLogger("torch._subclasses.fake_tensor")
# Torch has a function of this name in the module's place.
_scans: Any = importlib.import_module("torch._higher_order_ops.associative_scan")

# A composite operator's, and one in the place of autograd's formula for an operator that has a kernel.
DECOMPOSITION_KEYS = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)
DATA_DEPENDENT_ERRORS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)


class FakeTensorMode(_FakeTensorMode):
    """Torch's mode, in one thread at a time: it changes how all threads make tensors of Python's numbers."""

    def __enter__(self) -> Any:
        process_lock.__enter__()
        try:
            return super().__enter__()
        except BaseException:
            process_lock.__exit__()
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            process_lock.__exit__()


MAX_NODES = 50_000
"""Operators that a trace may record: to fuse as many takes about two minutes."""
_NODES_OF_A_STEP = 45
"""Operators of a step of a recurrent layer, backward included."""


class TooLongError(RuntimeError):
    """A trace would record more operators than is sensible."""


class _Tracer(PythonKeyTracer):
    """Torch's tracer, but for what it does to the process.

    It patches ``nn.Module``, for modules that are to become nodes; here none is. To change the base of
    thousands of classes takes longer than to trace a few operators, and other threads would notice.
    """

    user_frames: Callable[[], str] | None = None
    num_steps = 0
    """Steps of recurrent layers so far."""

    def trace(self, root: Any, concrete_args: Any = None) -> fx.Graph:
        self.root = torch.nn.Module()
        self.graph = fx.Graph(tracer_cls=PythonKeyTracer)
        self.tensor_attrs = {}
        run, args = self.create_args_for_root(root, False, concrete_args)
        self.create_node("output", "output", (self.create_arg(run(*args)),), {})
        return self.graph

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if len(self.graph.nodes) > MAX_NODES:
            raise TooLongError(f"more than {MAX_NODES:,} operators")
        node = super().create_node(*args, **kwargs)
        if self.user_frames is not None and not node.stack_trace:
            node.stack_trace = self.user_frames()
        return node


class _MakeFx(_MakefxTracer):
    def __init__(self, decompositions: Any, user_frames: Callable[[], str] | None) -> None:
        super().__init__(
            decomposition_table=decompositions,
            tracing_mode="real",
            _allow_non_fake_inputs=False,
            pre_dispatch=False,
            record_module_stack=False,
            _allow_fake_constant=False,
            _error_on_data_dependent_ops=True,
            _disable_torch_fn_metadata_mode=True,
        )
        self._user_frames = user_frames

    def _construct_modes_with_fx_tracer(self, fx_tracer: Any) -> None:
        self.fx_tracer = _Tracer()
        self.fx_tracer.user_frames = self._user_frames
        super()._construct_modes_with_fx_tracer(self.fx_tracer)


def make_fx(
    function: Callable[..., Any],
    *,
    decomposition_table: Any = None,
    user_frames: Callable[[], str] | None = None,
) -> Callable[..., fx.GraphModule]:
    """Torch's tracer; nodes keep what ``user_frames`` returns when they are made as where they come from.

    The module that it makes is written as Python when it is first called, if ever: most graphs are only read
    and rewritten, and to write one with thousands of nodes takes a second.
    """
    tracer = _MakeFx(decomposition_table, user_frames)

    def traced(*examples: Any) -> fx.GraphModule:
        with process_lock, _use_lazy_graph_module(True):
            return tracer.trace(function, *examples)

    return traced


class _Thread(threading.local):
    is_tracing = False


_thread = _Thread()


class _InTracingThread:
    """True in the thread that traces a user's code, false in others: in the place of a bool of torch's."""

    def __bool__(self) -> bool:
        return _thread.is_tracing

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    def __hash__(self) -> int:
        return hash(bool(self))

    def __or__(self, other: Any) -> Any:  # Transformers asks ``flag |= torch.compiler.is_compiling()``
        return bool(self) | other

    def __and__(self, other: Any) -> Any:
        return bool(self) & other

    __ror__, __rand__ = __or__, __and__


def while_tracing(own: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """``own`` in the thread that traces a user's code, ``original`` in others: they do not see a patch."""

    @functools.wraps(original)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (own if _thread.is_tracing else original)(*args, **kwargs)

    return chosen


@contextmanager
def replaced(owner: Any, **own: Callable[..., Any]) -> Iterator[None]:
    """While active, the thread that traces finds these functions as attributes of ``owner``."""
    with ExitStack() as stack:
        for name, function in own.items():
            chosen = while_tracing(function, getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, chosen))
        yield


def graph_module(root: torch.nn.Module, graph: fx.Graph, *, lazily: bool = True) -> fx.GraphModule:
    """A module of ``graph``, with what it refers to from ``root``; it is written when it is first called.

    Torch drops the traceback of an error in that first call where no Python lies between the module's code
    and the kernel. A module that is not made ``lazily`` is written now; its ``forward`` has no such call.
    """
    with process_lock, _use_lazy_graph_module(lazily):
        return _make_graph_module(root, graph)


def is_plain(dtype: torch.dtype) -> bool:
    """Whether no ambient switch of torch's could change numbers, and ``dtype`` is the default one."""
    return (
        torch.is_grad_enabled()
        and torch.get_default_dtype() is dtype
        and not torch.is_inference_mode_enabled()
        and not torch.is_anomaly_enabled()
        and torch._C._len_torch_function_stack() == 0  # a default device is a function mode, too
        and not torch._C._is_any_autocast_enabled()
    )


@contextmanager
def plain_torch(dtype: torch.dtype) -> Iterator[None]:
    """Switch off autocast, anomaly and inference mode, ``no_grad`` and the default device; set the dtype.

    Numbers then do not depend on the block that a fleet is called in. Switches of the whole process (anomaly
    mode, the default dtype) are touched only where they must change.
    """
    if is_plain(dtype):
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                torch.set_autocast_enabled(kind, False)
                stack.callback(torch.set_autocast_enabled, kind, True)
        if torch.is_anomaly_enabled():
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        before = torch.get_default_dtype()
        if before is not dtype:
            torch.set_default_dtype(dtype)
            stack.callback(torch.set_default_dtype, before)
        yield


def static_fake_mode() -> FakeTensorMode:
    """A mode for graphs that a compiler will see: it wants a shape environment, though shapes are fixed."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # late: it imports sympy

    return FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)


class ConstantChangedError(RuntimeError):
    """Code changes a tensor in place that is neither an input nor made by the code."""


class _WithoutConstantsChanged(FunctionalTensorMode):
    """Torch would change the tensor itself, now and with every run of the graph."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema if isinstance(func, OpOverload) else None
        if schema is not None and schema.is_mutable:
            for argument, value in zip(schema.arguments, args, strict=False):
                written = argument.alias_info is not None and argument.alias_info.is_write
                if written and isinstance(value, Tensor) and not isinstance(value, FunctionalTensor):
                    raise ConstantChangedError(str(func))
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def functionalized(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` with every mutation turned into a new value, as seen by a tracer outside of it."""

    def run(*args: Tensor) -> Any:
        with _WithoutConstantsChanged():
            wrapped = pytree.tree_map_only(Tensor, FunctionalTensor.to_functional, args)
            out = fn(*wrapped)
        return pytree.tree_map_only(FunctionalTensor, traced_tensor, out)

    return run


def traced_tensor(value: FunctionalTensor) -> Tensor:
    """The tensor that the tracer outside of a ``functionalized`` function sees, with all changes made."""
    torch._sync(value)  # type: ignore[attr-defined]
    return torch._from_functional_tensor(value.elem)


def frames_of(wanted: Callable[[str], bool]) -> Callable[[], str]:
    """A function that says which lines of files that are ``wanted`` are being run, the innermost one last.

    Many nodes have one line's frames, which are written once.
    """
    known: dict[tuple[tuple[str, int, str], ...], str] = {}

    def frames() -> str:
        stack = [(frame.f_code, line) for frame, line in traceback.walk_stack(sys._getframe(1))]
        found = tuple(
            (code.co_filename, line, code.co_name)
            for code, line in reversed(stack)
            if wanted(code.co_filename)
        )
        if found not in known:
            summary = traceback.StackSummary.from_list([traceback.FrameSummary(*frame) for frame in found])
            known[found] = "".join(summary.format()).strip()
        return known[found]

    return frames


def _plain_scan(combine: Callable[..., Any], leaves: Sequence[Tensor], additional_inputs: Any = ()) -> Any:
    """An associative scan over the first dimension by operators on tensors."""
    return _scans.generic_associative_scan(combine, leaves, 0, additional_inputs)


def _no_effects(op: Any) -> bool:
    return False


class _EagerWhileTracing:
    """Torch's setting for compiled functions; the thread that traces runs what they were made of."""

    def __init__(self, usual: Any) -> None:
        self._usual = usual

    def __getattr__(self, name: str) -> Any:
        return "force_eager" if name == "stance" and _thread.is_tracing else getattr(self._usual, name)


def _unchecked_while_tracing(usual: bool) -> property:
    """``Distribution._validate_args``: a check reads values, which the thread that traces does not have."""

    def read(distribution: Any) -> bool:
        return not _thread.is_tracing and bool(distribution.__dict__.get("_validate_args", usual))

    def write(distribution: Any, value: bool) -> None:
        distribution.__dict__["_validate_args"] = value

    return property(read, write)


@contextmanager
def replacing_thread() -> Iterator[None]:
    """While active, ``replaced`` functions act in this thread, and nothing else is told that it is traced."""
    with process_lock, mock.patch.object(_thread, "is_tracing", new=True):
        yield


@contextmanager
def tracing_thread() -> Iterator[None]:
    """While active, patches of torch act in this thread; no other one traces meanwhile.

    Model code that looks for it (Hugging Face's mask builders do) is told that it is being traced. The python
    dispatcher makes torch use its own decompositions of composite operators: recurrent layers become cell
    steps instead of a call into a vendor library.
    """
    import torch._dynamo.eval_frame  # late: torch imports it for its first trace, which takes a while

    distribution: Any = torch.distributions.Distribution
    compiled: Any = torch._dynamo.eval_frame
    with ExitStack() as stack:
        stack.enter_context(process_lock)
        stack.callback(setattr, _thread, "is_tracing", _thread.is_tracing)
        _thread.is_tracing = True
        stack.enter_context(enable_python_dispatcher())
        # The backward pass of a CUDA device would run in a thread of torch's.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        if torch.is_anomaly_enabled():  # for all threads; gradients' values would be read
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
        patches: tuple[tuple[Any, str, Any], ...] = (
            (torch.compiler, "_is_compiling_flag", _InTracingThread()),
            (compiled, "_stance", _EagerWhileTracing(compiled._stance)),
            (distribution, "_validate_args", _unchecked_while_tracing(distribution._validate_args)),
        )
        if hasattr(_symbolic_trace, "_is_fx_tracing_flag"):
            patches += ((_symbolic_trace, "_is_fx_tracing_flag", _InTracingThread()),)
        else:  # torch 2.14 has one for each thread
            own_flag: Any = _symbolic_trace
            stack.enter_context(own_flag._is_fx_tracing_context(True))
        for owner, name, own in patches:
            stack.enter_context(mock.patch.object(owner, name, own))
        # Checks of linear algebra would otherwise be threaded through the graph with tokens.
        stack.enter_context(replaced(torch._higher_order_ops.effects, has_effects=_no_effects))
        stack.enter_context(replaced(_scans, associative_scan_op=_plain_scan))
        # What fails is raised, with the user's line; torch would also log a hundred lines of its own.
        stack.enter_context(replaced(_fake_tensor_log, exception=lambda *args: None))
        yield


@contextmanager
def override_composites(table: Mapping[OpOverload, Callable[..., Any] | None]) -> Iterator[None]:
    """Replace the decomposition of operators while tracing, under each key where torch has one in Python.

    With ``None`` an operator runs as torch's own C++ code has it.
    """
    places = [(op, key) for op in table for key in decomposition_keys(op) or DECOMPOSITION_KEYS[:1]]
    saved = [(op, key, op.py_kernels.get(key)) for op, key in places]
    try:
        for op, key, usual in saved:
            own = table[op]
            usual = usual or functools.partial(op._op_dk, key)
            _set_decomposition(op, key, None if own is None else while_tracing(own, usual))
        yield
    finally:
        for op, key, original in saved:
            _set_decomposition(op, key, original)


def _set_decomposition(op: OpOverload, key: DispatchKey, function: Callable[..., Any] | None) -> None:
    if function is None:
        op.py_kernels.pop(key, None)
    else:
        op.py_kernels[key] = function
    op._dispatch_cache.clear()


def decomposition_keys(op: OpOverload) -> list[DispatchKey]:
    """The keys under which the python dispatcher runs an operator as torch's own Python functions have it."""
    return [key for key in DECOMPOSITION_KEYS if key in op.py_kernels]


@contextmanager
def recurrent_layers(
    lstm_cell: Callable[..., tuple[Tensor, Tensor]], stack_layers: Callable[..., Any]
) -> Iterator[None]:
    """While active, torch's decomposition of recurrent layers uses these for a step and for the layers."""
    decompositions: Any = torch._decomp.decompositions

    def plain_layer(*args: Any) -> Any:
        return decompositions.one_layer_lstm  # otherwise one of a vendor library where nothing is learned

    with replaced(
        decompositions,
        lstm_cell=lstm_cell,
        _rnn_helper=stack_layers,
        select_one_layer_lstm_function=plain_layer,
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


def _tracer() -> Any:
    mode = get_proxy_mode()
    if mode is None:
        raise RuntimeError("expected to run inside make_fx, got no active tracer")
    return mode.tracer


def tracer_graph() -> fx.Graph:
    """The graph that the innermost running ``make_fx`` writes to."""
    graph: fx.Graph = _tracer().graph
    return graph


def traced_module() -> torch.nn.Module:
    """The module that holds the constants of the innermost running ``make_fx``."""
    root: torch.nn.Module = _tracer().root
    return root


def outside_of_tracing() -> AbstractContextManager[Any]:
    """While active, operators compute as if nothing was being traced."""
    return _disable_current_modes()


def traced_node(value: Tensor) -> fx.Node | None:
    """The node that the innermost running ``make_fx`` has for a tensor; ``None`` for a constant."""
    mode = get_proxy_mode()
    if isinstance(value, FunctionalTensor):
        value = traced_tensor(value)
    slot: Any = None if mode is None else get_proxy_slot(value, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def refuses_generators(error: Exception) -> bool:
    """Whether a tracer stopped at a ``torch.Generator``: that of torch 2.11 has no nodes with one."""
    return isinstance(error, NotImplementedError) and str(torch._C.Generator) in str(error)


def traced_operator(error: Exception) -> OpOverload | None:
    """The operator that was being traced when an error came up."""
    return next(reversed(_values_in_frames(error, "func", OpOverload)), None)


def higher_order_operator(error: Exception) -> str | None:
    """The operator that takes functions (``torch.cond``, ``while_loop``) that was called when one came up."""
    found = _values_in_frames(error, "self", HigherOrderOperator)
    return f"torch.ops.higher_order.{found[0].name()}" if found else None


def _values_in_frames(error: Exception, name: str, kind: type) -> list[Any]:
    """Values of that kind of the local variable ``name`` in the frames of a traceback, outermost first."""
    values = [frame.f_locals.get(name) for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [value for value in values if isinstance(value, kind)]


def has_vmap_rule(op: OpOverload) -> bool:
    """Whether ``torch.vmap`` knows the operator; without a rule it loops, and only warns.

    Torch registers some rules, that of the cross entropy among them, only when ``vmap`` is first called.
    """
    lazy_load_decompositions()
    has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
    layers = ("Batched", "BatchedDecomposition", "DynamicLayerFrontMode", "VmapMode")
    return any(has_kernel(op.name(), f"FuncTorch{layer}") for layer in layers)


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


def expect_recurrence(length: int, num_layers: int) -> None:
    """Refuse a recurrence that makes the trace under way, if any, too long before it is unrolled."""
    mode = get_proxy_mode()
    if mode is None:
        return
    tracer: Any = mode.tracer
    tracer.num_steps += length * num_layers
    if tracer.num_steps * _NODES_OF_A_STEP > MAX_NODES:
        raise TooLongError(
            f"a recurrence over {length} steps, of {tracer.num_steps} in all layers and directions so far"
        )


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

    def region(*args: Any, **kwargs: Any) -> Iterator[None]:
        graph = tracer_graph()
        last = last_node(graph)
        yield
        on_region(nodes_after(graph, last))

    def apply(run_function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        with contextmanager(region)():
            return run_function(*args)

    module = torch.utils.checkpoint
    name = "_checkpoint_without_reentrant_generator"
    name += "_impl" if hasattr(module, f"{name}_impl") else ""  # from torch 2.14 on
    with (
        replaced(module, **{name: region}),
        replaced(module.CheckpointFunction, apply=apply),
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
    from torch._functorch import partitioners

    def draws(graph: fx.GraphModule) -> bool:
        # Attention has the tag of operators that draw, but what it dropped would be a mask of ours.
        return False

    _merge_equal(joint.graph)
    with (
        process_lock,
        functorch_config.patch(cse=False),
        _use_lazy_graph_module(True),
        mock.patch.object(partitioners, "has_recomputable_rng_ops", draws),
    ):
        forward, backward = partitioners.min_cut_rematerialization_partition(
            joint,
            None,
            num_fwd_outputs=num_forward_outputs,
            static_lifetime_input_indices=list(static_inputs),
        )
    return forward, backward


def _merge_equal(graph: fx.Graph) -> None:
    """Compute equal values once, but for random ones, empty ones and results of the graph.

    As torch's own pass does it, which imports all of Inductor to look for operators that write.
    """
    from torch._functorch.compile_utils import get_aten_target, rand_ops

    def storage(node: fx.Node) -> int | None:
        value = node.meta.get("val")
        return value.untyped_storage()._cdata if isinstance(value, Tensor) else None

    results = {storage(node) for node in graph.output_node().all_input_nodes} - {None}
    known: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        target = get_aten_target(node)
        is_apart = target in rand_ops or target is torch.ops.aten.empty or storage(node) in results
        if node.op != "call_function" or is_apart:
            continue
        leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
        first = known.setdefault((node.target, spec, tuple((leaf, type(leaf)) for leaf in leaves)), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
