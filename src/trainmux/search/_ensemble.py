"""``tm.ensemble``: trained members as one module that computes all of them at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from trainmux.errors import BatchError, ConfigError, MemberError, first_line, warn_user
from trainmux.fleet import Fleet, Member, copied, view_key
from trainmux.search._cross_validate import FoldResult
from trainmux.search._trial import Trial
from trainmux.tracing import FlatBatch, Reach, flatten_batch

_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
"""Layers that do nothing in evaluation mode, whatever their ``p``."""


def ensemble(
    members: Fleet | Iterable[Member | nn.Module | Trial | FoldResult],
    *,
    output: Callable[[Any], Any] | None = None,
) -> Ensemble:
    """Make one module of trained members: of a fleet as it is now, of members or models, of a search's trials
    or the folds of a cross-validation.

    See `Ensemble`, which has copies of the weights. ``output`` takes what a member returns to what is to be
    averaged, as in ``lambda found: found.logits.softmax(-1)``.
    """
    if isinstance(members, Fleet):
        members.sync()
        members = members.members
    models, names = [], []
    for number, given in enumerate(members):
        item = given.member if isinstance(given, (Trial, FoldResult)) else given
        if not isinstance(item, (Member, nn.Module)):
            raise MemberError(
                f"expected a Fleet, or Members, torch modules, trials or folds, got {type(item).__name__} "
                "among them; trials whose members a search has not kept have none"
            )
        models.append(item.model if isinstance(item, Member) else item)
        name = item.name if isinstance(item, Member) else None
        names.append(name or f"member-{number}")
    return Ensemble(models, names, output)


class Ensemble(nn.Module):
    """The mean of several models, in evaluation mode; ``mean_and_variance`` and ``outputs`` tell more.

    It takes what one of them takes, and returns tensors, or dicts, sequences and the like of them, as one of
    them does. Its tensors are copies: what lies in memory that members share is held once. Models that
    differ in values only are computed together, by ``torch.vmap``; where that cannot be done they are
    computed one after another, with a ``TrainmuxWarning``. It moves (``.to()``), is saved and loaded like
    any module; ``members`` are the models by themselves.

    Refuses outputs that differ in structure or shape, and integers where a mean is asked for
    (``ConfigError``).
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        names: Sequence[str],
        output: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__()
        if not models:
            raise MemberError("expected at least one member for an ensemble, got none")
        self.names = tuple(names)
        skeletons = [_skeleton(model) for model in models]
        alike: dict[Hashable, list[int]] = {}
        for number, skeleton in enumerate(skeletons):
            alike.setdefault(_signature(skeleton), []).append(number)
        self.stacks = nn.ModuleList(
            _Stack([models[i] for i in rows], [skeletons[i] for i in rows], output) for rows in alike.values()
        )
        self._rows = list(alike.values())
        self.eval()

    def __len__(self) -> int:
        return len(self.names)

    @property
    def members(self) -> tuple[nn.Module, ...]:
        """The models by themselves, in the order of ``names``: copies, with the weights that are here."""
        found = {
            number: stack.member(row)
            for stack, rows in zip(self._all_stacks(), self._rows, strict=True)
            for row, number in enumerate(rows)
        }
        return tuple(found[number] for number in range(len(self)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The mean over the members."""
        flat = self._numbers(args, kwargs)
        return flat.rebuild([tensor.mean(0) for tensor in flat.tensors])

    def mean_and_variance(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The mean over the members, and how they differ: the mean squared distance from it."""
        flat = self._numbers(args, kwargs)
        means = flat.rebuild([tensor.mean(0) for tensor in flat.tensors])
        return means, flat.rebuild([tensor.var(0, correction=0) for tensor in flat.tensors])

    def outputs(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of all members; each tensor has a leading axis of members, ordered as ``names``."""
        flat = self._stacked(args, kwargs)
        return flat.rebuild(list(flat.tensors))

    def _all_stacks(self) -> list[_Stack]:
        return [stack for stack in self.stacks if isinstance(stack, _Stack)]

    def _numbers(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FlatBatch:
        flat = self._stacked(args, kwargs)
        for leaf in flat.spec.leaves:
            if not (leaf.dtype.is_floating_point or leaf.dtype.is_complex):
                raise ConfigError(
                    f"{leaf.path.replace('batch', 'output', 1)}: expected numbers with a mean, got "
                    f"{leaf.dtype}; take outputs(), or pass ensemble(..., output=lambda found: ...)"
                )
        return flat

    def _stacked(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FlatBatch:
        """Outputs of all members, each tensor with an axis of members."""
        flats = [stack.forward(args, kwargs) for stack in self._all_stacks()]
        first = flats[0]
        for flat, rows in zip(flats, self._rows, strict=True):
            _require_alike(first, flat, self.names[self._rows[0][0]], self.names[rows[0]])
        if len(flats) == 1:
            return first
        order = [number for rows in self._rows for number in rows]
        index = torch.tensor(order).argsort().to(first.tensors[0].device)
        parts = zip(*(flat.tensors for flat in flats), strict=True)
        joined = tuple(torch.cat(tensors).index_select(0, index) for tensors in parts)
        return FlatBatch(joined, first.spec, first.rebuild, first.text)


class _Stack(nn.Module):
    """Models that differ in the values of their tensors only: those tensors, one on another."""

    def __init__(
        self, models: Sequence[nn.Module], skeletons: list[nn.Module], output: Callable[[Any], Any] | None
    ) -> None:
        super().__init__()
        self._skeletons = skeletons
        self._output = output
        self._keys: dict[str, str] = {}
        self._shared: set[str] = set()
        self._one_by_one_because = ""
        states = [{**dict(model.named_parameters()), **dict(model.named_buffers())} for model in models]
        for number, (name, first) in enumerate(states[0].items()):
            tensors = [state[name].detach() for state in states]
            if len(tensors) > 1 and view_key(first) is not None and len(set(map(view_key, tensors))) == 1:
                self._shared.add(name)
                value = first.detach().clone()
            else:
                value = torch.stack(tensors)
            # A name with a dot in it may not be registered.
            key = self._keys[name] = f"{number}/{name.replace('.', '/')}"
            if isinstance(first, nn.Parameter):
                self.register_parameter(key, nn.Parameter(value, requires_grad=False))
            else:
                self.register_buffer(key, value)

    def extra_repr(self) -> str:
        how = f", one by one: {self._one_by_one_because}" if self._one_by_one_because else ""
        return f"{len(self._skeletons)} × {type(self._skeletons[0]).__name__}{how}"

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FlatBatch:
        """Outputs of all, each tensor with a leading axis of members."""
        if len(self._skeletons) > 1 and not self._one_by_one_because:
            try:
                return self._together(args, kwargs)
            except Exception as error:
                found = self._one_by_one(args, kwargs)  # raises what is wrong with the input, if it is that
                self._one_by_one_because = first_line(error)
                warn_user(
                    f"{type(self._skeletons[0]).__name__}: members of the ensemble are computed one after "
                    f"another, because torch.vmap refuses: {first_line(error)}"
                )
                return found
        return self._one_by_one(args, kwargs)

    def member(self, row: int) -> nn.Module:
        """One model, with copies of its tensors."""
        skeleton, state = self._skeletons[row], self._state(row)
        memo: dict[int, Any] = {}
        for name, place in skeleton.named_parameters():
            memo[id(place)] = nn.Parameter(state[name].detach().clone(), requires_grad=place.requires_grad)
        for name, buffer in skeleton.named_buffers():
            memo[id(buffer)] = state[name].clone()
        return copy.deepcopy(skeleton, memo)

    def _together(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FlatBatch:
        state = {name: self._held(name) for name in self._keys}
        shared = {name: state.pop(name) for name in self._shared}
        noted: list[FlatBatch] = []

        def one(own: dict[str, Tensor]) -> tuple[Tensor, ...]:
            noted.append(self._flat(self._skeletons[0], {**shared, **own}, args, kwargs))
            return noted[-1].tensors

        with _plain_attention():
            stacked = vmap(one)(state)
        return FlatBatch(tuple(stacked), noted[-1].spec, noted[-1].rebuild, noted[-1].text)

    def _one_by_one(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FlatBatch:
        flats = [
            self._flat(skeleton, self._state(row), args, kwargs)
            for row, skeleton in enumerate(self._skeletons)
        ]
        for row, flat in enumerate(flats):
            _require_alike(flats[0], flat, "the first member", f"member {row + 1} of its kind")
        parts = zip(*(flat.tensors for flat in flats), strict=True)
        return FlatBatch(tuple(map(torch.stack, parts)), flats[0].spec, flats[0].rebuild, flats[0].text)

    def _held(self, name: str) -> Tensor:
        found: Tensor = getattr(self, self._keys[name])
        return found

    def _state(self, row: int) -> dict[str, Tensor]:
        return {
            name: self._held(name) if name in self._shared else self._held(name)[row] for name in self._keys
        }

    def _flat(
        self, skeleton: nn.Module, state: dict[str, Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> FlatBatch:
        found = functional_call(skeleton, state, args, dict(kwargs))
        found = found if self._output is None else self._output(found)
        try:
            return flatten_batch(found)
        except BatchError as error:
            raise ConfigError(
                f"expected a member to return tensors, got {type(found).__name__}; pass "
                "ensemble(..., output=lambda found: ...) to choose some"
            ) from error


def _skeleton(model: nn.Module) -> nn.Module:
    """Copy a model without its values, in evaluation mode; ties between its tensors stay."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        # Of the shape, with the memory of one number.
        place = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(place, tensor.requires_grad) if is_parameter else place
    return copied(model, memo, "make an ensemble").eval()


def _signature(skeleton: nn.Module) -> Hashable:
    """Equal for models that compute the same in evaluation mode but for the values of their tensors."""
    dropouts = [(vars(part), part.p) for part in skeleton.modules() if type(part) in _DROPOUTS]
    for attributes, _ in dropouts:
        attributes["p"] = 0.0
    try:
        reach = Reach(skeleton)
        return tuple(reach.named), reach.signature
    finally:
        for attributes, p in dropouts:
            attributes["p"] = p


def _require_alike(one: FlatBatch, other: FlatBatch, first: str, second: str) -> None:
    if one.spec.structure != other.spec.structure or [leaf.shape for leaf in one.spec.leaves] != [
        leaf.shape for leaf in other.spec.leaves
    ]:
        got = [
            f"{flat.spec.structure} of shapes {[leaf.shape for leaf in flat.spec.leaves]} ({name})"
            for flat, name in ((one, first), (other, second))
        ]
        raise ConfigError(
            f"expected members with outputs of one structure and shape, got {got[0]} and {got[1]}; pass "
            "ensemble(..., output=lambda found: ...) to choose what they have in common"
        )


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Inside, torch's transformer layers have no shortcut of their own, for which vmap has no rule."""
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)
