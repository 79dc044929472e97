"""Batches of every shape come apart and go together again; other ones are refused by name."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from contextlib import nullcontext
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from odd_containers import Doubling, Two, closed

from trainmux.errors import BatchError
from trainmux.tracing import check_batch, flatten_batch


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Sample:
    image: Any
    label: Any
    note: str = "plain"


@dataclasses.dataclass(frozen=True, slots=True)
class SlottedSample:
    image: Any
    label: Any


class Encoding(UserDict[str, Any]):
    """Like a tokenizer's output: a UserDict that also answers attributes and carries state of its own."""

    def __init__(self, data: dict[str, Any], encodings: object = None) -> None:
        super().__init__(data)
        self._encodings = encodings

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["data"][name]
        except KeyError as error:
            raise AttributeError(name) from error


class Carrier:
    """Only attributes, as some collate functions return."""

    def __init__(self, image: Any, scale: Any) -> None:
        self.image, self.scale = image, scale


class Named(dict[str, Any]):
    """Entries as attributes; one that is missing is a ``KeyError``."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


class Titled(list[Any]):
    def __init__(self, title: str, items: Any = ()) -> None:
        super().__init__(items)
        self.title = title


A, B = torch.arange(3.0), torch.arange(3.0) + 10
OUTPUT = closed(x=A, y=B)
CASES: dict[str, tuple[Any, list[str]]] = {
    "tensor": (A, ["batch"]),
    "list": ([A, B], ["batch[0]", "batch[1]"]),
    "tuple": ((A, B), ["batch[0]", "batch[1]"]),
    "dict": ({"x": A, "y": B}, ["batch['x']", "batch['y']"]),
    "integer keys": ({0: A, 1: B}, ["batch[0]", "batch[1]"]),
    "ordered dict": (OrderedDict(x=A, y=B), ["batch['x']", "batch['y']"]),
    "default dict": (defaultdict(list, x=A, y=B), ["batch['x']", "batch['y']"]),
    "user dict": (UserDict({"x": A, "y": B}), ["batch['x']", "batch['y']"]),
    "encoding": (Encoding({"x": A, "y": B}, object()), ["batch['x']", "batch['y']"]),
    "dict with attributes": (Named(x=A, y=B), ["batch['x']", "batch['y']"]),
    "dict that computes": (Doubling(x=A, y=B), ["batch['x']", "batch['y']"]),
    "model output": (OUTPUT, ["batch['x']", "batch['y']"]),
    "tuple of its own": (Two(A, B), ["batch[0]", "batch[1]"]),
    "list of its own": (Titled("t", [A, B]), ["batch[0]", "batch[1]"]),
    "read-only mapping": (MappingProxyType({"x": A, "y": B}), ["batch['x']", "batch['y']"]),
    "named tuple": (Pair(A, B), ["batch[0]", "batch[1]"]),
    "dataclass": (Sample(A, B), ["batch.image", "batch.label"]),
    "frozen and slotted dataclass": (SlottedSample(A, B), ["batch.image", "batch.label"]),
    "object": (Carrier(A, 2.0), ["batch.image"]),
    "namespace": (SimpleNamespace(x=A, y=[B]), ["batch.x", "batch.y[0]"]),
    "deep in an object": ({"t": B, "o": Carrier({"x": A}, 1.0)}, ["batch['t']", "batch['o'].image['x']"]),
    "nested": (
        {"in": Sample(A, Pair(B, None)), "meta": [1, "two", (A,)]},
        ["batch['in'].image", "batch['in'].label[0]", "batch['meta'][2][0]"],
    ),
    "constants": ({"x": A, "n": 3, "s": "name", "none": None, "f": 1.5, "e": ()}, ["batch['x']"]),
}


@pytest.mark.parametrize("name", CASES)
def test_batches_come_apart_and_go_together_again(name: str) -> None:
    batch, paths = CASES[name]
    flat = flatten_batch(batch)
    leaves = [(leaf.path, leaf.shape, leaf.dtype) for leaf in flat.spec.leaves]
    assert leaves == [(path, (3,), torch.float32) for path in paths]
    others = [tensor + 100 for tensor in flat.tensors]
    rebuilt = flat.rebuild(others)
    assert type(rebuilt) is type(batch)
    for given, tensors in ((rebuilt, others), (batch, flat.tensors)):  # the original is left alone
        again = flatten_batch(given)
        assert all(got is wanted for got, wanted in zip(again.tensors, tensors, strict=True))
        assert again.spec == flat.spec
        assert hash(again.spec) == hash(flat.spec)
        check_batch(flat.spec, again.spec)


def test_containers_of_a_class_of_their_own_stay_what_they_are() -> None:
    """Attributes answer with the new tensors, and other state is carried along."""
    state = object()
    batch = [Named(x=A), Doubling(x=A), OUTPUT, Titled("t", [A]), Encoding({"x": A}, state)]
    rebuilt = flatten_batch(batch).rebuild([B] * 6)
    assert rebuilt[0].x is rebuilt[4].x is rebuilt[4]["x"] is B
    assert rebuilt[4]._encodings is state
    assert torch.equal(rebuilt[1]["x"], 2 * B)
    assert rebuilt[2].x is rebuilt[2]["x"] is B
    assert rebuilt[3].title == "t"
    assert OUTPUT.x is A


def test_numpy_arrays_count_as_tensors() -> None:
    read_only = np.arange(3.0)
    read_only.flags.writeable = False
    flat = flatten_batch({"x": read_only, "reversed": np.arange(3.0)[::-1], "n": np.arange(2)})
    assert [tensor.tolist() for tensor in flat.tensors] == [[0.0, 1.0, 2.0], [2.0, 1.0, 0.0], [0, 1]]
    zeros = torch.zeros(3, dtype=torch.float64)
    assert flatten_batch({"x": zeros, "reversed": zeros, "n": torch.arange(2)}).spec == flat.spec


STRINGS = {"x": A, "names": np.array(["a", "b"])}


@pytest.mark.parametrize("batch", [{}, None, 3, "text", {"a": 1}, Pair(None, "x"), STRINGS, A.to_sparse()])
def test_a_batch_without_tensors_or_with_others_than_dense_ones_is_refused(batch: Any) -> None:
    with pytest.raises(BatchError):
        flatten_batch(batch)


# One batch after another, with whether they share a graph; ``None`` where the second one is refused.
FOLLOWING: dict[str, tuple[Any, Any, bool | None]] = {
    "missing": ({"x": A, "y": B}, {"x": A}, None),
    "too many": ({"x": A}, {"x": A, "y": B}, None),
    "dtype": ([A], [A.double()], None),
    "dimensions": (Sample(A, B), Sample(A, B[:, None]), None),
    "constant": ({"x": A, "n": 1}, {"x": A, "n": 2}, None),
    "class": (Pair(A, B), (A, B), None),
    "none": ({"x": A, "n": None}, {"x": A}, None),
    "dataclass": (Sample(A, B), SlottedSample(A, B), None),
    "sizes": ({"x": torch.ones(4, 3)}, {"x": torch.ones(2, 5)}, False),
    "list": ((A, B), [A, B], True),  # a loader hands out lists where its data set has tuples
    "order": ({"x": A, "y": B}, {"y": B, "x": A}, False),  # fed in another order
}


@pytest.mark.parametrize("name", FOLLOWING)
def test_batches_that_may_follow_each_other(name: str) -> None:
    *batches, share_a_graph = FOLLOWING[name]
    first, second = (flatten_batch(batch).spec for batch in batches)
    with nullcontext() if share_a_graph is not None else pytest.raises(BatchError):
        check_batch(first, second)
    assert (first == second) is bool(share_a_graph)
