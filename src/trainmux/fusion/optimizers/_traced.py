"""Updates traced from an optimizer's own ``step``, for classes without a rule written by hand.

A stand-in of the optimizer holds one parameter, all tensors fake and all numeric settings symbols, and runs
the class's ``step``: once with no state, as before the first step, and once with state. Each decision that
depends on numbers is taken both ways, so an update is a tree of decisions with new values at its leaves.
Decisions and numbers that follow from settings and the count of steps are computed by the host, in Python's
arithmetic, and fed as ``[k]`` rows; others on the device. Both sides of a decision are computed where members
differ in it, and one that no member takes is left out.

Refused: an update that computes something else when it is traced again (a number was frozen), that depends on
other parameters, draws random numbers, or reads what a stand-in does not have.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from trainmux.errors import OptimizerError, named_line
from trainmux.fusion.optimizers._rule import NumericSetting, Settings, scalar_dtype
from trainmux.fusion.optimizers._symbols import (
    MAX_DECISIONS,
    Expression,
    ForkedError,
    PinnedError,
    Recording,
    Symbol,
    UnresolvedError,
    host_value,
    is_on_host,
    leaves_of,
    recorded,
)
from trainmux.fusion.optimizers._values import Computed, Evaluation, Ref, Values, host_parts
from trainmux.tracing import (
    FakeTensorMode,
    functionalized,
    innermost_user_frame,
    make_fx,
    output_nodes,
    replaced,
    replacing_thread,
)

_SWITCHES = {"foreach": False, "fused": None, "capturable": False, "differentiable": False}
"""Switches between torch's implementations of one update: the one for single tensors is traced."""
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "step",
    "state",
    "param_groups",
    "defaults",
)
_ONE_MORE = (("add", ("steps",), 1), ("add", 1, ("steps",)))


@dataclass(frozen=True)
class StateEntry:
    """An entry of a parameter's state: a "tensor", a "count" of steps, a "number", or a "constant".

    ``dtype`` is ``None`` where it is the parameter's. ``example`` is a constant itself, or a number
    like those that Python keeps, and ``None`` for tensors. Entries ``on_host`` are on the CPU wherever the
    parameter is.
    """

    name: str
    kind: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    example: Any = None
    on_host: bool = False


@dataclass(frozen=True)
class _Leaf:
    """New values by role, operands all."""

    outputs: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class _Branch:
    guard: Expression
    then: _Tree
    otherwise: _Tree


@dataclass(frozen=True)
class _Failure:
    """A path on which the optimizer raises."""

    text: str


_Tree = _Leaf | _Branch | _Failure


def _parts(tree: _Tree) -> Iterator[_Tree]:
    yield tree
    if isinstance(tree, _Branch):
        yield from _parts(tree.then)
        yield from _parts(tree.otherwise)


def _operands(tree: _Tree) -> list[Any]:
    """All that a tree computes, at its leaves and for its decisions."""
    found: list[Any] = []
    for part in _parts(tree):
        if isinstance(part, _Leaf):
            found += [operand for _, operand in part.outputs]
        elif isinstance(part, _Branch):
            found.append(Computed(part.guard))
    return found


def _host_parts(values: Values, operands: Sequence[Any]) -> list[Expression]:
    """The numbers that the host has to feed for these operands, each once."""
    computed = [item for item in operands if isinstance(item, Computed)]
    for value in map(values.found.__getitem__, values.reached(operands)):
        computed += value.operands(Computed)
        if value.target == "leaf" and value.args[0].startswith("count "):
            computed.append(Computed(("steps",)))
    return list(dict.fromkeys(part for item in computed for part in host_parts(item.expression)))


@dataclass(frozen=True)
class ShapeUpdate:
    """The update of parameters of one shape and dtype."""

    shape: tuple[int, ...]
    entries: tuple[StateEntry, ...]
    values: Values
    tree: _Tree
    initial: Mapping[str, Any]
    """Operands that give the state before the first step, where that does not depend on a gradient."""
    paths: list[Any]
    """Decisions by which parameters of another shape are found to have the same update."""
    is_elementwise: bool
    starts_filled: bool
    """Whether the constructor makes the state."""

    def text(self) -> str:
        """All that decides the update, equal for kinds that compute alike."""
        operands = [*_operands(self.tree), *self.initial.values()]
        order = {number: place for place, number in enumerate(self.values.reached(operands))}

        def written(item: Any) -> str:
            if isinstance(item, Ref):
                return f"%{order[item.number]}"
            if isinstance(item, Computed):
                return f"<{written(item.expression)}>"
            if isinstance(item, tuple) and item[:1] == ("read",):
                return f"%{order[item[1]]}"
            if isinstance(item, (tuple, list)):
                return f"({', '.join(map(written, item))})"
            return f"{type(item).__name__} {item}"

        def branches(tree: _Tree) -> str:
            if isinstance(tree, _Branch):
                sides = f"{branches(tree.then)} else {branches(tree.otherwise)}"
                return f"if {written(tree.guard)} then {sides}"
            return written(tree.outputs) if isinstance(tree, _Leaf) else tree.text

        lines = [
            f"{value.target} {written(value.args)} {written(tuple(value.kwargs.items()))} {value.dtype}"
            for value in (self.values.found[number] for number in order)
        ]
        return "\n".join(
            [str(self.entries), *lines, branches(self.tree), written(tuple(self.initial.items()))]
        )


class _Entries(dict[str, Any]):
    """State of one parameter that remembers what it was before the first change; a 0 is a count of steps."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording
        self.created: dict[str, Tensor] = {}
        self.types: dict[str, type] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor) and name not in self:
            self.created[name] = value.clone()
        elif type(value) in (int, float) and name not in self:
            self.types[name] = type(value)
            value = self._recording.symbol(("steps",)) if value == 0 else value
        super().__setitem__(name, value)


@dataclass(frozen=True)
class _StepRun:
    """One recorded run of ``step``: its graph, and which node is what, for each copy of the parameter."""

    graph: fx.Graph
    inputs: list[dict[str, fx.Node]]
    nodes: list[dict[str, fx.Node]]
    created: dict[str, fx.Node]
    state: dict[str, Any]
    order: list[str]
    types: dict[str, type]
    reads: list[fx.Node]
    recording: Recording


class _StandIn:
    """An optimizer that shares class, settings and attributes with another, but none of its tensors."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        number: int,
        pinned: frozenset[str],
        *,
        forks: bool,
        capturable: bool,
    ) -> None:
        self._optimizer = copy.copy(optimizer)
        memo: dict[int, Any] = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        kept = {name: value for name, value in vars(optimizer).items() if name not in _HOOKS}
        self._optimizer.__dict__ = {name: _copied(value, memo) for name, value in kept.items()}
        constants = {k: v for k, v in optimizer.defaults.items() if _is_switch(v) or isinstance(v, str)}
        self._optimizer.defaults = constants  # a number in them is not what the param group says
        self._optimizer._optimizer_step_pre_hooks = type(optimizer._optimizer_step_pre_hooks)()
        self._optimizer._optimizer_step_post_hooks = type(optimizer._optimizer_step_post_hooks)()
        own = optimizer.param_groups[number]
        self._settings = {name: value for name, value in own.items() if name != "params"}
        self._settings |= {name: value for name, value in _SWITCHES.items() if _is_switch(own.get(name, ""))}
        self._capturable = capturable
        if capturable:
            self._settings["capturable"] = True
        self._labels = frozenset(setting.label for setting in numeric_settings(own)) - pinned
        self._step: Any = inspect.unwrap(type(optimizer).step)
        self._decisive = (
            None if forks else {("setting", s.label): float(s.read(own)) for s in numeric_settings(own)}
        )
        self.fixed: dict[Expression, bool] = {}

    def recording(self, outcomes: tuple[bool, ...], seed: int, most: int = MAX_DECISIONS) -> Recording:
        """Make a recording to run with."""
        made = Recording(outcomes, seed, most, self._decisive)
        made.fixed = self.fixed
        return made

    def run(
        self,
        example: Tensor,
        entries: Sequence[StateEntry] | None,
        recording: Recording,
        *,
        copies: int = 1,
    ) -> _StepRun:
        """Record ``step`` for a parameter like ``example``; ``None`` entries mean that it has no state yet.

        Of several ``copies`` of the parameter, the last one is in a param group of its own.
        """
        carried = [entry for entry in entries or () if entry.kind != "constant"]
        held = [entry for entry in carried if not _is_host_count(entry)]
        results: list[dict[str, Any]] = []
        created: dict[str, Tensor] = {}
        plain: dict[str, Any] = {}
        types: dict[str, type] = {}
        order: list[str] = []

        def step(*tensors: Tensor) -> list[Tensor]:
            remaining = iter(tensors)
            self._optimizer.state = defaultdict(functools.partial(_Entries, recording))
            params = []
            for _ in range(copies):
                param = next(remaining).requires_grad_()
                param.grad = next(remaining)
                params.append(param)
                given = {entry.name: next(remaining) for entry in held}
                for entry in entries or ():
                    value = given.get(entry.name, entry.example)
                    if entry.kind == "number":
                        value = recording.read(value)
                    elif _is_host_count(entry):
                        value = recording.symbol(("steps",))
                    dict.__setitem__(self._optimizer.state[param], entry.name, value)
            settings = {name: self._symbolic(recording, name, v) for name, v in self._settings.items()}
            groups = [params[:-1], params[-1:]] if copies > 1 else [params]
            self._optimizer.param_groups = [{**settings, "params": list(own)} for own in groups]
            # Torch asks for a device that captures, unless a compiler is at work.
            compiling = {"is_compiling": lambda: True} if self._capturable else {}
            with recorded(recording, self._step), replaced(torch.compiler, **compiling):
                self._step(self._optimizer)
            self._check_groups(settings)
            for index, param in enumerate(params):
                results.append({"param": param})
                found = self._optimizer.state.get(param, {})
                for name, value in found.items():
                    if isinstance(value, Tensor):
                        results[index][f"state {name}"] = value
                    elif index == 0:
                        plain[name] = value
                if index == 0:
                    created.update(getattr(found, "created", {}))
                    types.update(getattr(found, "types", {}))
                    order.extend(found)
            if any(not isinstance(key, Tensor) or not _is_in(key, params) for key in self._optimizer.state):
                raise UnresolvedError("it keeps state that belongs to no parameter")
            new = [value for each in results for value in each.values()]
            return [*new, *created.values(), *recording.reads]

        names = ["param", "grad", *(f"state {entry.name}" for entry in held)]
        examples = []
        for _ in range(copies):
            examples += [torch.empty_like(example), torch.empty_like(example)]
            for entry in held:
                device = "cpu" if entry.on_host else example.device
                dtype = torch.float64 if entry.kind == "number" else entry.dtype or example.dtype
                examples.append(torch.empty(entry.shape, dtype=dtype, device=device))
        module = make_fx(functionalized(step))(*examples)
        inputs, found = iter(module.graph.find_nodes(op="placeholder")), iter(output_nodes(module))
        return _StepRun(
            module.graph,
            [dict(zip(names, inputs, strict=False)) for _ in range(copies)],
            [dict(zip(each, found, strict=False)) for each in results],
            dict(zip(created, found, strict=False)),
            plain,
            order,
            types,
            list(found),
            recording,
        )

    def _symbolic(self, recording: Recording, name: str, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            made = [self._symbolic(recording, f"{name}[{i}]", item) for i, item in enumerate(value)]
            return type(value)(made)
        if name not in self._labels:
            return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        return recording.symbol(("setting", name))

    def _check_groups(self, settings: Mapping[str, Any]) -> None:
        for group in self._optimizer.param_groups:
            for name, value in group.items():
                if name != "params" and settings.get(name) is not value:
                    raise UnresolvedError(f"it writes {name!r} into its param group; keep it in the state")


def _is_in(key: Any, params: Sequence[Any]) -> bool:
    return any(key is param for param in params)


def _is_switch(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _is_host_count(entry: StateEntry) -> bool:
    return entry.kind == "count" and entry.example is not None


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a lock, a generator: shared
        return value


def numeric_settings(settings: Settings) -> tuple[NumericSetting, ...]:
    """The settings of a torch param group that are numbers, or numbers in a tuple."""
    found = []
    for name, value in settings.items():
        if name == "params":
            continue
        if isinstance(value, (tuple, list)):
            found += [NumericSetting(name, i, signed=True) for i, v in enumerate(value) if _is_number(v)]
        elif _is_number(value):
            found.append(NumericSetting(name, signed=True))
    return tuple(found)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


class TracedUpdate:
    """The update of one param group, traced; equal for optimizers whose updates compute alike."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        number: int,
        examples: Sequence[Tensor],
        pinned: frozenset[str],
        *,
        forks: bool,
        capturable: bool,
    ) -> None:
        group = optimizer.param_groups[number]
        self._stand_in = _StandIn(optimizer, number, pinned, forks=forks, capturable=capturable)
        self._existing = [optimizer.state.get(param) for param in group["params"]]
        self._device = examples[0].device if examples else torch.device("cpu")
        self._kinds: dict[tuple[tuple[int, ...], torch.dtype], ShapeUpdate] = {}
        settings = numeric_settings(group)
        self._pinned = {s.label: float(s.read(group)) for s in settings if s.label in pinned}
        for example, existing in zip(examples, self._existing, strict=True):
            self.kind(tuple(example.shape), example.dtype, existing)
        parts = [
            part for kind in self._kinds.values() for part in _host_parts(kind.values, _operands(kind.tree))
        ]
        self._rows = {part: row for row, part in enumerate(dict.fromkeys(parts), 1)}
        leaves = {leaf for part in (*self._rows, *self._stand_in.fixed) for leaf in leaves_of(part)}
        read = {*self._pinned, *(leaf[1] for leaf in leaves if leaf[0] == "setting")}
        self.settings = tuple(setting for setting in settings if setting.label in read)
        """The numbers that ``formula`` reads; others may have more, such as a scheduler's ``initial_lr``."""
        self._guards = {
            self._rows[part.guard]
            for kind in self._kinds.values()
            for part in _parts(kind.tree)
            if isinstance(part, _Branch) and part.guard in self._rows
        }
        self.scalars = {f"row {row}": 0.0 for row in range(len(self._rows) + 1)}
        texts = [f"{key} {kind.text()}" for key, kind in sorted(self._kinds.items(), key=str)]
        fixed = sorted(map(str, self._stand_in.fixed.items()))
        whole = "\n".join(
            [type(optimizer).__qualname__, str(sorted(self._pinned.items())), str(fixed), *texts]
        )
        self._digest = hashlib.sha256(whole.encode()).hexdigest()

    def __repr__(self) -> str:
        return f"TracedUpdate({self._digest})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TracedUpdate) and other._digest == self._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    # ---- tracing -----------------------------------------------------------------------------------

    def kind(
        self, shape: tuple[int, ...], dtype: torch.dtype, existing: Mapping[str, Any] | None = None
    ) -> ShapeUpdate:
        """The update of parameters of one shape and dtype, traced when it is first asked for."""
        if (shape, dtype) not in self._kinds:
            with FakeTensorMode(), torch.no_grad(), replacing_thread():
                example = torch.empty(shape, dtype=dtype, device=self._device)
                others = [kind for (_, other), kind in self._kinds.items() if other == dtype]
                self._kinds[shape, dtype] = _trace(self._stand_in, example, existing, others)
        return self._kinds[shape, dtype]

    def fits(self, numbers: Mapping[str, Any]) -> bool:
        """Whether settings decide what they decided when this was traced."""
        columns = {("setting", label): value for label, value in numbers.items()}
        known: dict[Expression, Any] = {}
        return all(np.all(numbers.get(label) == value) for label, value in self._pinned.items()) and all(
            np.all(host_value(condition, columns.__getitem__, known) == outcome)
            for condition, outcome in self._stand_in.fixed.items()
        )

    # ---- on the host -------------------------------------------------------------------------------

    def formula(self, numbers: Mapping[str, Any], steps_done: Any) -> tuple[Any, ...]:
        """The rows for an update: 1, then numbers, and 1 or -1 for decisions; 0 where not reached."""
        columns = {("setting", label): value for label, value in numbers.items()} | {("steps",): steps_done}
        if not self.fits(numbers):
            decisive = sorted({*self._pinned, *(x for f in self._stand_in.fixed for _, x in leaves_of(f))})
            raise OptimizerError(
                f"expected {', '.join(decisive)} to decide the update as when it was traced, got "
                f"{[numbers[label] for label in decisive]}: undo the change, or call fleet.refresh."
            )
        width = max((len(c) for c in columns.values() if isinstance(c, np.ndarray)), default=1)
        rows = np.zeros((len(self.scalars), width))
        rows[0] = 1.0
        for kind in self._kinds.values():
            self._fill(kind, kind.tree, rows, np.arange(width), columns, {})
        return tuple(rows) if width > 1 else tuple(rows[:, 0].tolist())

    def _fill(
        self,
        kind: ShapeUpdate,
        tree: _Tree,
        rows: np.ndarray[Any, Any],
        who: np.ndarray[Any, Any],
        columns: Mapping[Expression, Any],
        known: dict[Expression, Any],
    ) -> None:
        """Compute the rows that the members ``who`` need on their way to the leaves of a tree."""

        def value(expression: Expression) -> Any:
            found = host_value(expression, columns.__getitem__, known)
            if np.iscomplexobj(found):
                raise ValueError(f"a power is no real number: {expression}")
            return found

        if isinstance(tree, _Failure):
            raise OptimizerError(tree.text)
        if isinstance(tree, _Leaf):
            for part in _host_parts(kind.values, _operands(tree)):
                if part in self._rows:
                    rows[self._rows[part], who] = value(part)
            return
        if not is_on_host(tree.guard):
            for part in _host_parts(kind.values, [Computed(tree.guard)]):
                rows[self._rows[part], who] = value(part)
            self._fill(kind, tree.then, rows, who, columns, known)
            self._fill(kind, tree.otherwise, rows, who, columns, known)
            return
        outcome = value(tree.guard)
        if not isinstance(outcome, np.ndarray):
            rows[self._rows[tree.guard], who] = 1.0 if outcome else -1.0
            self._fill(kind, tree.then if outcome else tree.otherwise, rows, who, columns, known)
            return
        rows[self._rows[tree.guard], who] = np.where(outcome, 1.0, -1.0)
        for chosen, side in ((outcome, tree.then), (~outcome, tree.otherwise)):
            if chosen.any():
                picked = {k: c[chosen] if isinstance(c, np.ndarray) else c for k, c in columns.items()}
                self._fill(kind, side, rows, who[chosen], picked, {})

    def idle(self, table: np.ndarray[Any, Any]) -> frozenset[str]:
        """The outcomes of decisions that no member has, by what was fed."""
        if not table.shape[1]:
            return frozenset()
        taken = {row: (bool((table[row] > 0).any()), bool((table[row] < 0).any())) for row in self._guards}
        names = {
            f"row {row} {side}": is_taken
            for row, sides in taken.items()
            for side, is_taken in zip((True, False), sides, strict=True)
        }
        return frozenset(name for name, is_taken in names.items() if not is_taken)

    # ---- on stacked tensors ------------------------------------------------------------------------

    def update(
        self,
        shape: tuple[int, ...],
        param: Tensor,
        grad: Tensor,
        state: Mapping[str, Tensor],
        at: Callable[[str], Tensor],
        idle: frozenset[str],
    ) -> None:
        """Change ``param`` and ``state`` in place, where the first row is not 0."""
        kind = self._kinds[shape, param.dtype]
        width = param.shape[0]
        tree = self._without(kind.tree, idle)
        parts = _host_parts(kind.values, _operands(tree))
        missing = [part for part in parts if part not in self._rows]
        if missing:
            raise OptimizerError(
                f"expected an update that uses the same numbers in every precision, got {missing[0]} only in "
                f"{param.dtype}. Train this member in the precision of its model."
            )
        names = list(state)
        fed = [at(f"row {self._rows[part]}").reshape(width) for part in parts]

        def member(param: Tensor, grad: Tensor, states: list[Tensor], fed: list[Tensor]) -> list[Tensor]:
            given: dict[Expression, Tensor] = dict(zip(parts, fed, strict=True))
            leaves = {"param": param, "grad": grad}
            leaves |= {f"state {name}": value for name, value in zip(names, states, strict=True)}

            def number_of(expression: Expression) -> Tensor:
                found = given.get(expression)
                if found is not None:
                    return found
                return torch.full((), expression, dtype=scalar_dtype(param.dtype), device=param.device)

            for entry in kind.entries:
                if entry.kind == "count":
                    dtype = entry.dtype or param.dtype
                    leaves[f"count {entry.name}"] = given.get(("steps",), number_of(0.0)).to(dtype)
            found = _results(tree, Evaluation(kind.values, leaves, number_of))
            return [found["param"], *(found[f"state {name}"] for name in names)]

        results = torch.vmap(member, randomness="error")(param, grad, [state[name] for name in names], fed)
        commits = at("row 0").reshape(width) != 0
        targets = (param, *state.values())
        masks = [commits.reshape(width, *[1] * (target.dim() - 1)) for target in targets]
        # All before any is written: a new value may be an old one of another tensor.
        new = [torch.where(*triple) for triple in zip(masks, results, targets, strict=True)]
        for target, value in zip(targets, new, strict=True):
            target.copy_(value)

    def _without(self, tree: _Tree, idle: frozenset[str]) -> _Tree:
        """A tree without the sides that no member takes."""
        if not isinstance(tree, _Branch):
            return tree
        sides = [self._without(side, idle) for side in (tree.then, tree.otherwise)]
        row = self._rows.get(tree.guard)
        for side, name in ((1, f"row {row} True"), (0, f"row {row} False")):
            if name in idle or isinstance(sides[1 - side], _Failure):
                return sides[side]
        return _Branch(tree.guard, *sides)

    # ---- a member's own state ----------------------------------------------------------------------

    def of(self, param: Tensor) -> ShapeUpdate:
        """The update of parameters like this one."""
        return self.kind(tuple(param.shape), param.dtype)

    def initial(self, settings: Settings, param: Tensor) -> dict[str, Tensor | float]:
        """State before the first step, from a member's settings and its parameter."""
        kind = self.of(param)
        columns: dict[Expression, float] = {("steps",): 0.0}
        columns |= {("setting", s.label): float(s.read(settings)) for s in numeric_settings(settings)}

        def number_of(expression: Expression) -> Tensor:
            number = host_value(expression, columns.__getitem__, {})
            return torch.full((), number, dtype=torch.float64, device=param.device)

        with torch.no_grad():
            leaf = _Leaf(tuple(kind.initial.items()))
            found = _results(leaf, Evaluation(kind.values, {"param": param.detach()}, number_of))
        return {e.name: found.get(e.name, 0.0) for e in kind.entries if e.kind in ("tensor", "number")}


def _results(tree: _Tree, member: Evaluation) -> dict[str, Tensor]:
    """New values of one member, of both sides where a decision is not the same for all."""
    assert not isinstance(tree, _Failure)
    if isinstance(tree, _Leaf):
        outputs = dict(tree.outputs)
        return dict(zip(outputs, member(list(outputs.values())), strict=True))
    (decided,) = member([Computed(tree.guard)])
    sides = [_results(side, member) for side in (tree.then, tree.otherwise)]
    return {role: torch.where(decided > 0, then, sides[1][role]) for role, then in sides[0].items()}


# ---- from runs to a tree -----------------------------------------------------------------------------------


class _UpdateTracer:
    """Runs a stand-in until every decision was taken both ways."""

    def __init__(self, stand_in: _StandIn, example: Tensor, values: Values) -> None:
        self._stand_in = stand_in
        self.example = example
        self.shape = tuple(example.shape)
        self.values = values

    def tree(self, entries: Sequence[StateEntry], *, first: bool, seed: int = 0) -> _Tree:
        """The tree of an update with state, or of the ``first``."""

        def explored(outcomes: tuple[bool, ...], known: tuple[list[Expression], _Tree] | None) -> _Tree:
            guards, leaf = known or self._leaf(entries, first, outcomes, seed)
            if len(guards) <= len(outcomes):
                return leaf
            guard = guards[len(outcomes)]
            then = explored((*outcomes, True), (guards, leaf))
            return _Branch(guard, then, explored((*outcomes, False), None))

        found = explored((), None)
        if not any(isinstance(part, _Leaf) for part in _parts(found)):
            raise UnresolvedError(next(part.text for part in _parts(found) if isinstance(part, _Failure)))
        return found

    def _leaf(
        self, entries: Sequence[StateEntry], first: bool, outcomes: tuple[bool, ...], seed: int
    ) -> tuple[list[Expression], _Tree]:
        recording = self._stand_in.recording(outcomes, seed)
        try:
            run = self._stand_in.run(self.example, None if first else entries, recording)
        except (PinnedError, ForkedError, UnresolvedError):
            raise
        except Exception as error:
            guards = [condition for condition, _ in recording.decisions]
            if not guards or not all(map(is_on_host, guards)):
                raise
            return guards, _Failure(f"the optimizer raised {named_line(error)}")
        return self.read(run, self.inputs(run, entries), entries)

    def paths(self, first: _StepRun | None, later: _StepRun, entries: Sequence[StateEntry]) -> list[Any]:
        """Trace a first and a later step on one path of decisions."""
        runs = [later] if first is None else [first, later]
        return [self.read(run, self.inputs(run, entries), entries) for run in runs]

    def continued(self, first: _StepRun, entries: Sequence[StateEntry]) -> Any:
        """Express a first step by the state that it makes, as if that had been given."""
        given = self.inputs(first, entries)
        for entry in entries:
            if entry.name in first.created:
                role = "count" if entry.kind == "count" else "state"
                node = first.created[entry.name].all_input_nodes[0]
                given[node] = self.values.leaf(f"{role} {entry.name}", node.meta["val"], self.shape)
        return self.read(first, given, entries)

    def inputs(self, run: _StepRun, entries: Sequence[StateEntry], own: int = 0) -> dict[fx.Node, int]:
        """The numbers of a run's inputs, named as if the copy ``own`` of the parameter were the only one."""
        counts = {f"state {e.name}": f"count {e.name}" for e in entries if e.kind == "count"}
        return {
            node: self.values.leaf(
                counts.get(name, name) if number == own else f"copy {number}'s {name}",
                node.meta["val"],
                self.shape,
            )
            for number, named in enumerate(run.inputs)
            for name, node in named.items()
        }

    def operands(
        self, run: _StepRun, given: Mapping[fx.Node, int], nodes: Iterable[fx.Node]
    ) -> Callable[[Any], Any]:
        """Number what nodes of a run need, and what it reads; the result turns nodes into operands."""
        wanted, symbols = [*nodes, *run.reads], run.recording.symbols
        return self.values.take(run.graph, wanted, given, symbols, run.reads, self.shape)

    def read(
        self, run: _StepRun, given: Mapping[fx.Node, int], entries: Sequence[StateEntry], own: int = 0
    ) -> tuple[list[Expression], _Tree]:
        """The decisions of a run, and the new values of one copy of the parameter as operands."""
        nodes = run.nodes[own]
        operand = self.operands(run, given, nodes.values())
        names = {name.removeprefix("state ") for name in nodes if name != "param"} | set(run.state)
        if not names <= {entry.name for entry in entries}:
            raise ForkedError(
                f"its state has further entries {sorted(names)} where decisions are taken otherwise"
            )
        guards = [operand(condition).expression for condition, _ in run.recording.decisions]
        outputs = {"param": operand(nodes["param"])}
        for entry in entries:
            if entry.name not in run.state and f"state {entry.name}" not in nodes:
                raise ForkedError(f"its state has no {entry.name!r} where decisions are taken otherwise")
            if entry.kind in ("constant", "count"):
                continue
            if (entry.name in run.state) == (entry.kind == "tensor"):
                raise ForkedError(f"its state {entry.name!r} is sometimes a tensor and sometimes a number")
            value = run.state.get(entry.name)
            outputs[f"state {entry.name}"] = (
                operand(nodes[f"state {entry.name}"])
                if entry.kind == "tensor"
                else operand(value.expression)
                if isinstance(value, Symbol)
                else value
            )
        return guards, _Leaf(tuple(outputs.items()))

    def counts_on(self, run: _StepRun, entry: StateEntry, entries: Sequence[StateEntry]) -> bool:
        """Whether a run with state adds one to an entry."""
        after: Any = run.state.get(entry.name)
        if entry.example is not None:
            expression = after.expression if isinstance(after, Symbol) else None
        else:
            node = run.nodes[0][f"state {entry.name}"]
            operand = self.operands(run, self.inputs(run, entries), [node])
            expression = self.values.known_to_host(operand(node).number)
        return expression in _ONE_MORE

    def any_run(self, entries: Sequence[StateEntry] | None, copies: int = 1) -> _StepRun:
        """Record a run on whichever side of its decisions there is no error."""
        most, run = copies * MAX_DECISIONS, functools.partial(self._stand_in.run, self.example, entries)
        try:
            return run(self._stand_in.recording((), 1, most), copies=copies)
        except (PinnedError, ForkedError, KeyError):
            raise
        except Exception:
            return run(self._stand_in.recording((False,) * most, 1, most), copies=copies)

    def fits(
        self,
        first: _StepRun | None,
        later: _StepRun,
        entries: Sequence[StateEntry],
        others: Sequence[StateEntry],
    ) -> bool:
        """Whether state is like that of parameters of another shape."""
        if [(e.name, e.shape, e.dtype) for e in entries] != [(e.name, e.shape, e.dtype) for e in others]:
            return False
        return first is not None and all(
            self.counts_on(later, mine, entries) if other.kind == "count" else mine.kind == other.kind
            for mine, other in zip(entries, others, strict=True)
            if mine.kind == "count" or other.kind == "count"
        )

    def initial(self, run: _StepRun, entries: Sequence[StateEntry]) -> dict[str, Any]:
        """Operands of the state that a first step makes of parameter and settings, if it needs no more."""
        nodes = {name: node.all_input_nodes[0] for name, node in run.created.items()}
        operand = self.operands(run, self.inputs(run, entries), nodes.values())
        if any(e.kind == "number" or (e.kind == "tensor" and e.name not in nodes) for e in entries):
            return {}
        found = {entry.name: operand(nodes[entry.name]) for entry in entries if entry.kind == "tensor"}
        reached = (self.values.found[number] for number in self.values.reached(list(found.values())))
        if any(value.target == "leaf" and value.args[0] != "param" for value in reached):
            return {}
        return found

    def check_alone(self, entries: Sequence[StateEntry], tree: _Tree) -> None:
        """Refuse an update that is another one where the optimizer holds more parameters."""
        run = self.any_run(entries, copies=3)
        side = all(outcome for _, outcome in run.recording.decisions)
        while isinstance(tree, _Branch):
            tree = tree.then if side else tree.otherwise
        alone = dict(tree.outputs) if isinstance(tree, _Leaf) else {}
        for number in range(3):
            _, leaf = self.read(run, self.inputs(run, entries, number), entries, number)
            own = dict(leaf.outputs) if isinstance(leaf, _Leaf) else {}
            if any(own[role] != operand for role, operand in alone.items() if isinstance(operand, Ref)):
                raise UnresolvedError("the update of a parameter depends on the other parameters")


def _trace(
    stand_in: _StandIn, example: Tensor, existing: Mapping[str, Any] | None, others: Sequence[ShapeUpdate]
) -> ShapeUpdate:
    """Trace the update of parameters like ``example``; one of ``others`` may do for them as well."""
    tracer = _UpdateTracer(stand_in, example, Values())
    shape = tracer.shape
    first: _StepRun | None = None
    try:
        first = tracer.any_run(None)
        entries = _entries(first, example)
    except KeyError:
        if not existing:
            raise
        entries = _existing_entries(existing, example)
    later = tracer.any_run(entries)
    for other in others:
        same = tuple(replace(e, shape=shape if e.shape == other.shape else e.shape) for e in other.entries)
        like = _UpdateTracer(stand_in, example, other.values)
        if like.fits(first, later, entries, same) and like.paths(first, later, same) == other.paths:
            return replace(other, entries=same, shape=shape)
    entries = tuple(
        _no_count(entry) if entry.kind == "count" and not tracer.counts_on(later, entry, entries) else entry
        for entry in entries
    )
    if any(entry.kind == "number" for entry in entries):
        later = tracer.any_run(entries)
    tree = tracer.tree(entries, first=False)
    if not others:
        # What is neither input nor symbol, but not the same again, was frozen: a count in an attribute, or a
        # number that was computed by something that cannot be followed.
        if tracer.tree(entries, first=False, seed=2) != tree:
            raise UnresolvedError("a number that changes from step to step is not in its settings or state")
        if first is not None:
            tracer.tree(entries, first=True)  # leaves the same state on every path, or raises
        tracer.check_alone(entries, tree)
    paths = tracer.paths(first, later, entries)
    initial: dict[str, Any] = {}
    if first is not None:
        initial = tracer.initial(first, entries)
        tensors = [entry for entry in entries if entry.kind in ("tensor", "number")]
        if len(initial) < len(tensors) or tracer.continued(first, entries) != paths[-1]:
            initial = {}
            tree = _Branch(("eq", ("steps",), 0), tracer.tree(entries, first=True), tree)
    alike = all(entry.shape in (shape, ()) for entry in entries)
    is_elementwise = alike and tracer.values.is_elementwise(_operands(tree))
    return ShapeUpdate(shape, entries, tracer.values, tree, initial, paths, is_elementwise, first is None)


def _entries(first: _StepRun, example: Tensor) -> tuple[StateEntry, ...]:
    """Describe the state that a first step leaves; whatever is 1 may be a count."""
    found = []
    for name in first.order:
        if name in first.state:
            value = first.state[name]
            is_count = isinstance(value, Symbol) and value.expression in _ONE_MORE
            found.append(_plain_entry(name, first.types[name](0) if is_count else value))
            continue
        value = first.nodes[0][f"state {name}"].meta["val"]
        found.append(_tensor_entry(name, value, example))
    return tuple(found)


def _existing_entries(existing: Mapping[str, Any], example: Tensor) -> tuple[StateEntry, ...]:
    return tuple(
        _tensor_entry(name, value, example) if isinstance(value, Tensor) else _plain_entry(name, value)
        for name, value in existing.items()
    )


def _plain_entry(name: str, value: Any) -> StateEntry:
    if isinstance(value, Symbol):
        return StateEntry(name, "number", example=0.0)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return StateEntry(name, "count", example=type(value)(0))
    if value is None or isinstance(value, (bool, str)):
        return StateEntry(name, "constant", example=value)
    raise UnresolvedError(f"its state {name!r} is a {type(value).__name__}; keep tensors and numbers there")


def _tensor_entry(name: str, value: Tensor, example: Tensor) -> StateEntry:
    kind = "count" if value.dim() == 0 and value.dtype.is_floating_point else "tensor"
    shape, dtype = tuple(value.shape), None if value.dtype == example.dtype else value.dtype
    on_host = value.device.type == "cpu" and example.device.type != "cpu"
    return StateEntry(name, kind, shape, dtype, None, on_host)


def _no_count(entry: StateEntry) -> StateEntry:
    kind = "tensor" if entry.example is None else "number"
    return StateEntry(entry.name, kind, entry.shape, entry.dtype, entry.example, entry.on_host)


_KNOWN: OrderedDict[Any, list[TracedUpdate]] = OrderedDict()
_MOST_KNOWN = 64


def traced_update(
    optimizer: torch.optim.Optimizer, number: int, params: Sequence[Tensor], *, where: str
) -> TracedUpdate:
    """The traced update of one param group; ``OptimizerError`` with the reason where there is none."""
    try:
        step: Any = inspect.unwrap(type(optimizer).step)
        for name, parameter in list(inspect.signature(step).parameters.items())[1:]:
            if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
                raise UnresolvedError(f"its step needs {name!r}, and a fleet computes the gradients itself")
        group = optimizer.param_groups[number]
        numbers = {setting.label: float(setting.read(group)) for setting in numeric_settings(group)}
        constants = _constants(optimizer, group)
        key = (type(optimizer), step, constants, frozenset(numbers), tuple(map(_outline, params)))
        known = _KNOWN.setdefault(key, [])
        for update in known:
            if update.fits(numbers):
                return update
        known.append(_traced_anew(optimizer, number, params))
        while len(_KNOWN) > _MOST_KNOWN:
            _KNOWN.popitem(last=False)
        return known[-1]
    except Exception as error:
        line = innermost_user_frame(error.__traceback__)
        own = isinstance(error, (UnresolvedError, ForkedError))
        reason = str(error) if own else named_line(error)
        raise OptimizerError(
            f"{where}: expected an optimizer whose step can be traced for one parameter, got "
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__}: {reason}"
            f"{f' (at {line})' if line else ''}. Compute with torch operators and the settings of the param "
            "group, and keep what changes in the parameter's state; use another optimizer, such as "
            "torch.optim.AdamW; or train this member outside the fleet."
        ) from error


def _traced_anew(optimizer: torch.optim.Optimizer, number: int, params: Sequence[Tensor]) -> TracedUpdate:
    """Trace with as many settings free as can be, as ``capturable`` if it does not go otherwise."""
    pinned: frozenset[str] = frozenset()
    forks, capturable = True, False
    failed: Exception | None = None
    while True:
        try:
            return TracedUpdate(optimizer, number, params, pinned, forks=forks, capturable=capturable)
        except PinnedError as error:
            if error.labels <= pinned:
                raise UnresolvedError(str(error)) from error
            pinned |= error.labels
        except ForkedError:
            if not forks:
                raise
            forks = False
        except Exception as error:
            if capturable or "capturable" not in optimizer.param_groups[number]:
                raise failed or error from None
            failed, capturable = error, True


def _constants(optimizer: torch.optim.Optimizer, group: Settings) -> Any:
    """All that decides a trace besides numeric settings, hashable."""
    numeric = {setting.name for setting in numeric_settings(group)}
    switches = {
        name: value if name in numeric and isinstance(value, (tuple, list)) else str(value)
        for name, value in group.items()
        if name != "params" and (name not in numeric or isinstance(value, (tuple, list)))
    }
    shapes = {
        name: [item if not _is_number(item) else "number" for item in value]
        if not isinstance(value, str)
        else value
        for name, value in switches.items()
    }
    attributes = {name: value for name, value in vars(optimizer).items() if name not in _HOOKS}
    return str(sorted(shapes.items())), tuple(sorted((n, _fingerprint(v)) for n, v in attributes.items()))


def _fingerprint(value: Any) -> str:
    if isinstance(value, (int, float, str, bool, type(None), dict, list, tuple)):
        return str(value)
    return f"{type(value).__qualname__} {id(value)}"


def _outline(tensor: Tensor) -> Any:
    return tuple(tensor.shape), tensor.dtype, tensor.device
