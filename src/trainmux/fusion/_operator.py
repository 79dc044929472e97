"""Compute one operator of a member's graph once for all members.

This is done by the operator's rule, or, for the long tail, by ``torch.vmap`` of that one operator, or by a
loop over members where torch has no rule either. Values that do not depend on the member (a shared batch,
masks, positions) stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._ops import OpOverload

from trainmux.errors import FusionError
from trainmux.fusion._stacked import Context, Stacked, find_rule, is_stacked
from trainmux.fusion.rules.pointwise import is_pointwise, pointwise
from trainmux.tracing import has_vmap_rule, last_node, node_location, nodes_after, tracer_graph


class OperatorFuser:
    """Computes single nodes of a member's graph for ``width`` members, inside a tracer."""

    def __init__(self, width: int) -> None:
        self._width = width
        self.how = ("unknown", "")
        """The way the last operator was fused, and why there was no better one."""

    def __call__(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute ``node`` for these arguments, some of which may be ``Stacked``."""
        leaves = pytree.tree_leaves((args, kwargs), is_leaf=is_stacked)
        if not any(is_stacked(leaf) for leaf in leaves):
            self.how = ("shared", "")
            return node.target(*args, **kwargs)  # type: ignore[operator]
        try:
            result = self._fused(node, args, kwargs)
        except FusionError:
            raise
        except Exception as error:
            raise self._error(node, f"{type(error).__name__}: {error}") from error
        wrong = self._mismatch(node, result)
        if wrong:
            raise self._error(node, f"the rule '{self.how[0]}' gave {wrong}")
        return result

    def _fused(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op = node.target
        if not isinstance(op, OpOverload):
            if self._width > 1:
                raise self._error(node, "it is not an ATen operator")
            self.how = ("loop", "not an ATen operator")
            return self._loop(node, args, kwargs)
        context = Context(self._width, node.meta.get("val"))
        named = find_rule(op)
        if named is not None:
            result = named.apply(context, op, *args, **kwargs)
            if result is not NotImplemented:
                self.how = (named.how_alone if self._width == 1 else named.how, "")
                return result
        if is_pointwise(op):
            self.how = ("pointwise", "")
            return pointwise(context, op, *args, **kwargs)
        return self._vmapped(node, op, args, kwargs)

    def _vmapped(self, node: fx.Node, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not has_vmap_rule(op):
            self.how = ("loop", "torch.vmap has no rule for it")
            return self._loop(node, args, kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=is_stacked)
        positions = [i for i, leaf in enumerate(leaves) if is_stacked(leaf)]

        shape_of_result: list[Any] = []

        def member(*tensors: Tensor) -> list[Tensor]:
            filled = list(leaves)
            for position, tensor in zip(positions, tensors, strict=True):
                filled[position] = tensor
            member_args, member_kwargs = pytree.tree_unflatten(filled, spec)
            values, result_spec = pytree.tree_flatten(op(*member_args, **member_kwargs))
            present = [isinstance(value, Tensor) for value in values]
            shape_of_result[:] = [result_spec, present]
            return [value for value in values if isinstance(value, Tensor)]  # vmap takes no None

        graph = tracer_graph()
        last = last_node(graph)
        try:
            results = iter(torch.vmap(member, randomness="error")(*[leaves[i].tensor for i in positions]))
            result_spec, present = shape_of_result
            result = pytree.tree_unflatten(
                [Stacked(next(results)) if is_tensor else None for is_tensor in present], result_spec
            )
            wrong = self._mismatch(node, result)
            reason = f"torch.vmap's rule is wrong here ({wrong})" if wrong else ""
        except Exception as error:
            text = str(error).strip().splitlines()[0][:160] if str(error) else type(error).__name__
            reason = f"torch.vmap cannot do it ({text})"
        if not reason:
            self.how = ("vmap", "")
            return result
        for new in reversed(nodes_after(graph, last)):
            graph.erase_node(new)
        self.how = ("loop", reason)
        return self._loop(node, args, kwargs)

    def _loop(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target: Callable[..., Any] = node.target  # type: ignore[assignment]
        by_storage = "as_strided" in str(target)  # counts offsets from the beginning of the storage
        given, form = pytree.tree_flatten((args, kwargs), is_leaf=is_stacked)
        traced = pytree.tree_leaves((node.args, node.kwargs))

        def row(leaf: Any, source: Any, index: int) -> Any:
            if not isinstance(leaf, Stacked):
                return leaf
            if by_storage:
                return leaf.tensor[index].clone()
            # A kernel may want the strides that it was traced with.
            is_dense = isinstance(source, fx.Node) and source.meta["val"].is_contiguous()
            return leaf.tensor[index].contiguous() if is_dense else leaf.tensor[index]

        results = []
        for index in range(self._width):
            rows = [row(leaf, source, index) for leaf, source in zip(given, traced, strict=True)]
            member_args, member_kwargs = pytree.tree_unflatten(rows, form)
            results.append(target(*member_args, **member_kwargs))
        columns = [pytree.tree_flatten(result)[0] for result in results]
        spec = pytree.tree_flatten(results[0])[1]
        merged = [
            Stacked(torch.stack(list(column))) if isinstance(column[0], Tensor) else column[0]
            for column in zip(*columns, strict=True)
        ]
        return pytree.tree_unflatten(merged, spec)

    def _mismatch(self, node: fx.Node, result: Any) -> str:
        """Describe a wrong shape or dtype of a fused value; empty if there is none."""
        expected = node.meta.get("val")
        if expected is None:
            return ""
        pairs = [(result, expected)]
        if isinstance(expected, (tuple, list)):
            pairs = list(zip(result, expected, strict=True))
        for value, member in pairs:
            if not isinstance(member, Tensor) or value is None:
                continue
            tensor = value.tensor if isinstance(value, Stacked) else value
            shape = (self._width, *member.shape) if isinstance(value, Stacked) else tuple(member.shape)
            if tuple(tensor.shape) != shape or tensor.dtype != member.dtype:
                return f"{tuple(tensor.shape)} {tensor.dtype} where {shape} {member.dtype} was expected"
        return ""

    def _error(self, node: fx.Node, reason: str) -> FusionError:
        location = node_location(node)
        where = f" at {location}" if location else ""
        return FusionError(
            f"{node.target}{where} cannot be fused over {self._width} members: {reason}",
            op=str(node.target),
            location=location,
        )
