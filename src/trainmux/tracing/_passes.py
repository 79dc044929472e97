"""Passes over traced graphs, each in place, and the cut of a joint graph into forward and backward."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from trainmux.ir import GraphInput, GraphOutput, InputKind, OutputKind
from trainmux.tracing._torch_private import FakeTensor, min_cut, outside_of_tracing

aten = torch.ops.aten

# After functionalization nothing is written to, so these are plain aliases of their argument.
_PASS_THROUGH = frozenset({aten.detach.default, aten.alias.default})
REGION = "ac_graph_id"
"""The key in a node's ``meta`` of its checkpointed region's number, which torch's partitioner reads."""
_INHERITED = ("stack_trace", "recompute", REGION)


def output_nodes(module: fx.GraphModule) -> list[fx.Node]:
    """The nodes that a graph returns, flat."""
    (output,) = module.graph.find_nodes(op="output")
    nodes: list[fx.Node] = pytree.tree_leaves(output.args)
    return nodes


def graph_constant(module: nn.Module, node: fx.Node) -> Tensor:
    """The tensor that a ``get_attr`` node stands for."""
    value = operator.attrgetter(str(node.target))(module)
    assert isinstance(value, Tensor)
    return value


def source_of(node: fx.Node) -> fx.Node:
    """The node that computes the value of ``node``, behind aliases of it."""
    while node.op == "call_function" and node.target in _PASS_THROUGH:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node


def simplify(module: fx.GraphModule, kept_outputs: Iterable[int]) -> None:
    """Keep only some outputs; drop aliases and unused nodes."""
    nodes = output_nodes(module)
    (output,) = module.graph.find_nodes(op="output")
    output.args = ([source_of(nodes[position]) for position in kept_outputs],)
    for node in list(module.graph.nodes):
        source = source_of(node)
        if source is not node:
            node.replace_all_uses_with(source)
    _compute_transposes_directly(module.graph)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()


def _compute_transposes_directly(graph: fx.Graph) -> None:
    """``t(mm(a, b))`` becomes ``mm(t(b), t(a))``.

    Autograd computes a linear layer's weight gradient transposed and returns a transposed view, which every
    later pass would read with strided accesses.
    """
    for node in graph.find_nodes(op="call_function", target=aten.t.default):
        product = node.args[0]
        if product.target is not aten.mm.default or len(product.users) != 1:
            continue
        left, right = product.args
        with graph.inserting_before(node):
            swapped = graph.call_function(
                aten.mm.default, (_transposed(graph, right), _transposed(graph, left))
            )
        swapped.meta["val"] = node.meta["val"].contiguous()
        inherit_meta(swapped, product)
        node.replace_all_uses_with(swapped)


def _transposed(graph: fx.Graph, node: fx.Node) -> fx.Node:
    if node.target is aten.t.default:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return source
    transposed = graph.call_function(aten.t.default, (node,))
    transposed.meta["val"] = node.meta["val"].t()
    inherit_meta(transposed, node)
    return transposed


def inherit_meta(new: fx.Node, old: fx.Node) -> None:
    """Give a node the origin and marks of the one that it replaces."""
    for key in _INHERITED:
        if key in old.meta:
            new.meta[key] = old.meta[key]


# ---- devices -------------------------------------------------------------------------------------------


def move_to(module: fx.GraphModule, device: torch.device) -> None:
    """Compute on ``device`` what user code makes on the CPU: constants, ranges, what it fetched itself.

    A graph's inputs are all on one device. A copy from the host in the middle of a step would wait for the
    device, and a step that waits cannot be captured.
    """

    def moved(value: Tensor) -> Tensor:
        if value.device.type == device.type:
            return value
        if not isinstance(value, FakeTensor):
            return value.to(device)
        with value.fake_mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)

    for node in module.graph.nodes:
        if node.op == "get_attr":
            owner, _, name = str(node.target).rpartition(".")
            setattr(module.get_submodule(owner), name, moved(graph_constant(module, node)))
        values = pytree.tree_leaves(node.meta.get("val"))
        if all(value.device.type == device.type for value in values if isinstance(value, Tensor)):
            continue
        if isinstance(node.target, OpOverload) and any(
            argument.name == "device" for argument in node.target._schema.arguments
        ):
            kept = {name: value for name, value in node.kwargs.items() if name != "pin_memory"}
            node.kwargs = {**kept, "device": device}
        node.meta["val"] = pytree.tree_map_only(Tensor, moved, node.meta["val"])
    module.recompile()


# ---- attention masks -----------------------------------------------------------------------------------

_BIAS_NAMES = frozenset({"attn_bias", "bias", "attn_mask"})
_MAX_CONSTANT_NODES = 400
"""A constant computed by more nodes than this, or a mask, is left alone."""


def drop_constant_masks(module: fx.GraphModule) -> None:
    """Replace constant masks that hide nothing, or just the future, by the kernel's own.

    Libraries build a mask tensor when they are traced, even for plain attention. The kernel then reads a mask
    of the size of the scores, and computes what it hides.
    """
    known: dict[fx.Node, bool | None] = {}
    changed = False
    for node in module.graph.nodes:
        if not is_attention(node.target):
            continue
        given = arguments_by_name(node)
        bias = next((value for name, value in given.items() if name in _BIAS_NAMES and value), None)
        if not isinstance(bias, fx.Node) or given["is_causal"]:
            continue
        if bias not in known:
            known[bias] = _is_causal(module, bias)
        is_causal = known[bias]
        if is_causal is not None:
            _replace_mask(node, is_causal=is_causal)
            changed = True
    if changed:
        module.graph.eliminate_dead_code()
        module.graph.lint()
        module.recompile()


def is_attention(target: Any) -> bool:
    """Whether an operator is one of the fused attention kernels."""
    return isinstance(target, OpOverload) and "_scaled_dot_product" in target.name()


def arguments_by_name(node: Any) -> dict[str, Any]:
    """All arguments of an operator by name, defaults included, in the order of its schema.

    ``node`` is one of a graph, or something like it with a target, args and kwargs.
    """
    described = node.target._schema.arguments
    given = zip((argument.name for argument in described), node.args, strict=False)
    return {**{argument.name: argument.default_value for argument in described}, **dict(given), **node.kwargs}


def written_arguments(node: fx.Node) -> list[Any]:
    """The arguments that an operator writes to."""
    if not isinstance(node.target, OpOverload):
        return []
    described = node.target._schema.arguments
    names = [each.name for each in described if each.alias_info is not None and each.alias_info.is_write]
    return [arguments_by_name(node)[name] for name in names]


def _replace_mask(node: fx.Node, *, is_causal: bool) -> None:
    """Write positional arguments out, so that fusion rules find each of them by its place."""
    described = node.target._schema.arguments  # type: ignore[union-attr]
    new = arguments_by_name(node) | {"is_causal": is_causal} | dict.fromkeys(_BIAS_NAMES)
    by_name = {argument.name for argument in described if argument.kwarg_only}
    node.args = tuple(new[argument.name] for argument in described if not argument.kwarg_only)
    node.kwargs = {name: new[name] for name in node.kwargs if name in by_name}


def _is_causal(module: fx.GraphModule, bias: fx.Node) -> bool | None:
    """True for a constant mask that hides what lies after each query, false for one that hides nothing."""
    mask = constant_value(module, bias)
    if mask is None:
        return None
    seen = mask if mask.dtype == torch.bool else mask == 0
    hidden = ~mask if mask.dtype == torch.bool else mask.isneginf() | (mask <= torch.finfo(mask.dtype).min)
    if bool(seen.all()):
        return False
    if mask.shape[-1] != mask.shape[-2]:
        return None
    lower = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    return True if bool((seen == lower).all() and (hidden == ~lower).all()) else None


def constant_value(module: nn.Module, wanted: fx.Node) -> Tensor | None:
    """The value of a node, on the CPU, where it depends on no input and no draw and takes few nodes."""
    order = _constant_history(wanted)
    if order is None:
        return None
    values: dict[fx.Node, Any] = {}
    with torch.no_grad(), outside_of_tracing():
        for node in order:
            if node.op == "get_attr":
                values[node] = graph_constant(module, node).cpu()
                continue
            given = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
            args, kwargs = pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), given)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    value = values[wanted]
    return value if isinstance(value, Tensor) else None


def _constant_history(node: fx.Node) -> list[fx.Node] | None:
    """All nodes that ``node`` is computed from, in order; ``None`` if an input or a draw is among them."""
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current in found:
            continue
        is_random = torch.Tag.nondeterministic_seeded in getattr(current.target, "tags", ())
        if current.op == "placeholder" or is_random or len(found) >= _MAX_CONSTANT_NODES:
            return None
        found.add(current)
        waiting += current.all_input_nodes
    return [n for n in node.graph.nodes if n in found]


# ---- forward and backward (D3) -------------------------------------------------------------------------


@dataclass(frozen=True)
class SplitGraph:
    """Forward and backward with the values that pass between them.

    ``forward`` takes all inputs but the tangent and returns the forward outputs, then ``saved``;
    ``backward`` takes ``saved`` by name, then the tangent if it needs it, and returns gradients.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    num_forward_outputs: int


def split_joint(
    module: fx.GraphModule, inputs: tuple[GraphInput, ...], outputs: tuple[GraphOutput, ...]
) -> SplitGraph:
    """Cut a joint graph (which is used up) where the fewest bytes pass from forward to backward.

    Torch's min-cut partitioner decides; what a cheap chain of operators can recompute is not saved. It runs
    after fusion, so that a value shared by all members counts once.
    """
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for position, (node, described) in enumerate(zip(placeholders, inputs, strict=True)):
        role = "tangents" if described.kind is InputKind.TANGENT else "primals"
        node.target = f"{role}_{position + 1}"
        node._rename(node.target)
    module.recompile()
    num_forward = sum(output.kind is not OutputKind.GRADIENT for output in outputs)
    static = [position for position, item in enumerate(inputs) if item.kind is InputKind.PARAMETER]
    forward, backward = min_cut(module, num_forward, static)
    return SplitGraph(forward, backward, num_forward)
