"""A program's graph, lowered: compiled regions between library calls (D4)."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, fx, nn

from trainmux.lowering._compile import Kernel, KernelCache
from trainmux.lowering._given_memory import Place, same_strides
from trainmux.lowering._kinds import Kind, changes, root_of
from trainmux.lowering._padding import extended_product, pad_unaligned
from trainmux.lowering._partition import cut
from trainmux.lowering._regions import Extractor, RegionGraph, TensorSpec, spec_of
from trainmux.lowering._rewrites import write_to_whole_tensors
from trainmux.tracing import graph_constant, graph_module


class RegionCall(nn.Module):
    """One region of a program: gives its outputs as a list of new tensors.

    ``changed`` are the positions of inputs that it writes to.
    """

    def __init__(
        self,
        kernel: Kernel,
        outputs: Sequence[TensorSpec],
        placed: Sequence[bool],
        changed: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.outputs = tuple(outputs)
        self.placed = tuple(placed)
        self.changed = tuple(changed)

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        return self.into(inputs, [None] * len(self.outputs))

    def into(self, inputs: Sequence[Tensor], places: Sequence[Place | None]) -> list[Tensor]:
        """Run, with each output in its place if it has one."""
        given = [
            spec.empty() if place is None else spec.inside(place)
            for spec, is_placed, place in zip(self.outputs, self.placed, places, strict=True)
            if is_placed
        ]
        others = [place for place, is_placed in zip(places, self.placed, strict=True) if not is_placed]
        rest = iter(self.kernel.run([*inputs, *given], others if any(others) else ()))
        memory = iter(given)
        found = []
        for spec, is_placed, place in zip(self.outputs, self.placed, places, strict=True):
            result = next(memory) if is_placed else next(rest)
            if not is_placed:
                result = _conformed(result, spec) if place is None else place.take(result)
            found.append(result)
        return found


class Conform(nn.Module):
    """Hands on a library call's results in the layout that regions were compiled for."""

    def __init__(self, specs: Sequence[TensorSpec | None]) -> None:
        super().__init__()
        self.specs = tuple(specs)

    def forward(self, *results: Tensor) -> list[Tensor]:
        return [_conformed(result, spec) for result, spec in zip(results, self.specs, strict=True)]


def _conformed(result: Tensor, spec: TensorSpec | None) -> Tensor:
    if spec is None or same_strides(result, spec.strides):
        return result
    return spec.empty().copy_(result)


@dataclass(frozen=True)
class Lowered:
    """A program's module with its regions, and the distinct kernels behind them."""

    module: fx.GraphModule
    kernels: tuple[Kernel, ...]
    num_regions: int
    num_calls: int

    def text(self) -> str:
        """A description of how it runs, once its kernels are compiled."""
        regions = f"{self.num_regions} regions compiled as {len(self.kernels)} kernels"
        text = f"{regions}, {self.num_calls} library calls"
        failed = [kernel.failure for kernel in self.kernels if kernel.failure]
        if failed:
            text += f"; {len(failed)} kernels through ATen, the first because {failed[0]}"
        return text


def lower(module: fx.GraphModule, cache: KernelCache, *, keeps_results: bool = False) -> Lowered:
    """Cut ``module`` into regions and library calls; regions run node by node until they are compiled.

    ``keeps_results``: results of the forward pass are computed before the backward pass begins.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    source = graph_module(module, graph)  # takes the constants that the graph refers to
    _read_what_was_changed(source.graph)
    write_to_whole_tensors(source.graph)
    pad_unaligned(source.graph)
    return _Writer(source, cache, keeps_results).write()


def _read_what_was_changed(graph: fx.Graph) -> None:
    """Have readers of an in-place operator's result read its input instead: it is the same tensor."""
    for node in graph.nodes:
        changed = changes(node)
        if changed is not None and root_of(changed).op == "placeholder":
            node.replace_all_uses_with(changed)


class _Writer:
    """Writes the lowered graph."""

    def __init__(self, source: fx.GraphModule, cache: KernelCache, keeps_results: bool) -> None:
        self._source = source
        self._cache = cache
        self._cut = cut(source.graph, keeps_results=keeps_results)
        self._extractor = Extractor(source.graph, self._cut)
        self._graph = fx.Graph()
        self._owner = nn.Module()
        self._new: dict[fx.Node, fx.Node] = {}
        self._kernels: dict[str, Kernel] = {}

    def write(self) -> Lowered:
        for node in self._source.graph.nodes:
            if node.op == "placeholder":
                self._new[node] = self._graph.node_copy(node)
            elif node.op == "get_attr":
                self._owner.register_buffer(
                    str(node.target), graph_constant(self._source, node), persistent=False
                )
                self._new[node] = self._graph.node_copy(node)
        num_regions = 0
        for piece in self._cut.pieces:
            if self._cut.is_library(piece):
                self._write_call(piece[0])
            else:
                self._write_region(self._extractor.region(piece), num_regions)
                num_regions += 1
        (output,) = self._source.graph.find_nodes(op="output")
        self._graph.output(fx.map_arg(output.args[0], self._value))
        self._graph.lint()
        module = graph_module(self._owner, self._graph)
        return Lowered(
            module, tuple(self._kernels.values()), num_regions, len(self._cut.pieces) - num_regions
        )

    def _value(self, node: fx.Node) -> fx.Node:
        """The new node for an old one; views, and tuples' parts, are written where they are first needed."""
        if node in self._new:
            return self._new[node]
        if self._cut.kinds[node] is not Kind.INLINE and node.target is not operator.getitem:
            raise RuntimeError(f"expected {node} to be computed before it is read")
        self._new[node] = self._graph.node_copy(node, self._value)
        return self._new[node]

    def _write_call(self, node: fx.Node) -> None:
        new = self._graph.node_copy(node, self._value)
        self._new[node] = new
        value = node.meta.get("val")
        if "extended" in node.meta:
            new.target = extended_product
            assert value is not None
            new.args = (node.target, *node.meta["extended"], tuple(value.shape[-2:]), *new.args)  # type: ignore[arg-type]
            return
        if isinstance(value, Tensor):
            self._new[node] = self._conform(new, [spec_of(node)], [new])[0]
        elif isinstance(value, (tuple, list)):
            parts = [user for user in node.users if user.target is operator.getitem]
            specs = [spec_of(part) if isinstance(part.meta.get("val"), Tensor) else None for part in parts]
            got = [self._graph.call_function(operator.getitem, (new, part.args[1])) for part in parts]
            for part, result in zip(parts, self._conform(new, specs, got), strict=True):
                self._new[part] = result

    def _conform(
        self, call: fx.Node, specs: Sequence[TensorSpec | None], results: Sequence[fx.Node]
    ) -> list[fx.Node]:
        if not any(specs) or changes(call) is not None:
            return list(results)
        name = f"conform_{call.name}"
        self._owner.add_module(name, Conform(specs))
        conformed = self._graph.call_module(name, tuple(results))
        conformed.meta["phase"] = call.meta.get("phase")
        return [self._graph.call_function(operator.getitem, (conformed, i)) for i in range(len(results))]

    def _write_region(self, region: RegionGraph, index: int) -> None:
        key = region.key()
        if key not in self._kernels:
            self._kernels[key] = self._cache.kernel(key, lambda: region)
        name = f"region_{index}"
        written = {root_of(node) for node in map(changes, region.body) if node is not None}
        changed = [position for position, node in enumerate(region.inputs) if root_of(node) in written]
        assert changed or region.outputs, "a region without any effect would be left out of planned steps"
        self._owner.add_module(
            name, RegionCall(self._kernels[key], region.output_specs, region.placed, changed)
        )
        call = self._graph.call_module(name, tuple(self._value(node) for node in region.inputs))
        call.meta["phase"] = region.body[-1].meta.get("phase")
        for position, node in enumerate(region.outputs):
            self._new[node] = self._graph.call_function(operator.getitem, (call, position))
