"""Attention masks that are constants and hide nothing, or merely the future: tell the kernel so.

Libraries build a mask tensor when they are traced, even for plain attention. The kernel then reads a mask
of the size of the scores, and computes what it hides.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._ops import OpOverload

from trainmux.tracing._cleanup import graph_constant

_BIAS_NAMES = frozenset({"attn_bias", "bias", "attn_mask"})
_MAX_NODES = 400
_NOTHING, _FUTURE, _SOMETHING = "nothing", "the future", "something"


def drop_constant_masks(module: fx.GraphModule) -> int:
    """Replace constant masks by the kernel's own; returns how many calls changed."""
    known: dict[fx.Node, str] = {}
    changed = 0
    for node in module.graph.nodes:
        if not _is_attention(node):
            continue
        names = [argument.name for argument in node.target._schema.arguments]
        given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        bias = next((given[name] for name in names if name in _BIAS_NAMES and given.get(name)), None)
        if not isinstance(bias, fx.Node) or given.get("is_causal"):
            continue
        if bias not in known:
            known[bias] = _what_it_hides(module, bias)
        if known[bias] in (_NOTHING, _FUTURE):
            _replace_mask(node, is_causal=known[bias] == _FUTURE)
            changed += 1
    if changed:
        module.graph.eliminate_dead_code()
        module.graph.lint()
        module.recompile()
    return changed


def _is_attention(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and isinstance(node.target, OpOverload)
        and "_scaled_dot_product" in node.target.name()
    )


def _replace_mask(node: fx.Node, *, is_causal: bool) -> None:
    described = node.target._schema.arguments  # type: ignore[union-attr]
    changes: dict[str, Any] = {"is_causal": is_causal} | dict.fromkeys(_BIAS_NAMES)
    positional, keyword = list(node.args), dict(node.kwargs)
    for position, argument in enumerate(described):
        if argument.kwarg_only:
            if argument.name in changes:
                keyword[argument.name] = changes[argument.name]
            continue
        # What stands before a changed argument is written out too: positions then mean what they say.
        if position >= len(positional):
            positional.append(keyword.pop(argument.name, argument.default_value))
        positional[position] = changes.get(argument.name, positional[position])
    node.args, node.kwargs = tuple(positional), keyword


def _what_it_hides(module: fx.GraphModule, bias: fx.Node) -> str:
    """What a mask hides: nothing, exactly what lies after each query, or something else (inputs decide)."""
    order = _constant_history(bias)
    if order is None:
        return _SOMETHING
    values: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for node in order:
            if node.op == "get_attr":
                values[node] = graph_constant(module, node).cpu()
                continue
            given = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
            args, kwargs = pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), given)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    mask = values[bias]
    if not isinstance(mask, Tensor):
        return _SOMETHING
    seen = mask if mask.dtype == torch.bool else mask == 0
    hidden = ~mask if mask.dtype == torch.bool else mask.isneginf() | (mask <= torch.finfo(mask.dtype).min)
    if bool(seen.all()):
        return _NOTHING
    if mask.shape[-1] != mask.shape[-2]:
        return _SOMETHING
    lower = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    return _FUTURE if bool((seen == lower).all() and (hidden == ~lower).all()) else _SOMETHING


def _constant_history(node: fx.Node) -> list[fx.Node] | None:
    """All nodes that ``node`` is computed from, in order; ``None`` if an input is among them."""
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current in found:
            continue
        is_random = (
            isinstance(current.target, OpOverload)
            and torch.Tag.nondeterministic_seeded in current.target.tags
        )
        if current.op == "placeholder" or is_random or len(found) >= _MAX_NODES:
            return None
        found.add(current)
        waiting += current.all_input_nodes
        if any(isinstance(leaf, torch.SymInt) for leaf in pytree.tree_leaves((current.args, current.kwargs))):
            return None
    return [n for n in node.graph.nodes if n in found]
