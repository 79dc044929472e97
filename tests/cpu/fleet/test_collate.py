"""Sequences of uneven length come in few shapes, and train as they would without the padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fleet_cases import train_alone
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader

import trainmux as tm
from trainmux.errors import BatchError, ConfigError

LENGTHS = (4, 8, 13)
sequences = st.lists(st.lists(st.integers(-5, 40), max_size=13), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(sequences, st.integers(-9, 9), st.booleans())
def test_batches_hold_the_sequences_and_nothing_but_padding_behind_them(
    rows: list[list[int]], pad: int, are_dicts: bool
) -> None:
    collate = tm.BucketCollate(LENGTHS, pad={"ids": pad, 0: pad, 1: -100})
    dicts = [{"ids": torch.tensor(row, dtype=torch.int64), "labels": row, "weight": 0.5} for row in rows]
    samples: list[Any] = dicts if are_dicts else [tuple(sample.values()) for sample in dicts]
    batch = collate(samples)
    ids, labels, weight = batch.values() if are_dicts else batch
    expected = min(length for length in LENGTHS if length >= max(map(len, rows)))
    assert ids.shape == labels.shape == (len(rows), expected)
    assert ids.dtype == torch.int64
    assert torch.equal(weight, torch.full((len(rows),), 0.5, dtype=weight.dtype))
    for row, given_ids, given_labels in zip(rows, ids.tolist(), labels.tolist(), strict=True):
        assert given_ids == row + [pad] * (expected - len(row))
        assert given_labels == row + [-100] * (expected - len(row))
    assert labels.is_floating_point() == (not any(rows))


def test_only_named_keys_are_padded_and_cut() -> None:
    collate = tm.BucketCollate([2, 3], keys=["x"], cut=True)
    batch = collate([{"x": torch.ones(size, 2), "features": torch.zeros(5)} for size in (1, 7)])
    assert torch.equal(batch["x"][0], torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]))
    assert batch["x"].shape == (2, 3, 2)
    assert batch["features"].shape == (2, 5)


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([], "at least one sample"),
        ([{"x": list(range(20))}], "at most 13, got one of 20"),
        ([{"x": [1]}, {"y": [1]}], "the same parts"),
        ([{"x": [1]}, {"x": 1}], "'x': expected a tensor or a list"),
        ([torch.ones(3)], "put a single sequence into a tuple"),
    ],
)
def test_what_cannot_be_padded_is_refused(samples: list[Any], said: str) -> None:
    with pytest.raises(BatchError, match=said):
        tm.BucketCollate(LENGTHS)(samples)


@pytest.mark.parametrize("lengths", [[], [0], [2.5]])
def test_lengths_that_are_none_are_refused(lengths: list[Any]) -> None:
    with pytest.raises(ConfigError, match="lengths: expected"):
        tm.BucketCollate(lengths)


class Tagger(nn.Module):
    """A class for each token; nothing flows between tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 6), nn.Linear(6, 50)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(ids))
        return out


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def test_a_fleet_trains_on_few_shapes_as_on_sequences_without_padding() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, 50, (int(size),), generator=generator) for size in (3, 4, 7, 2, 12, 8, 1, 5)]
    loader = DataLoader(
        [{"ids": row, "labels": row} for row in rows], batch_size=2, collate_fn=tm.BucketCollate(LENGTHS)
    )
    torch.manual_seed(0)
    model, plain = Tagger().double(), Tagger().double()
    plain.load_state_dict(model.state_dict())
    fleet = tm.Fleet([tm.Member(model, torch.optim.SGD(model.parameters(), 0.5))], loss, next(iter(loader)))
    alone = tm.Member(plain, torch.optim.SGD(plain.parameters(), 0.5))
    pairs = [torch.cat(rows[first : first + 2]) for first in range(0, len(rows), 2)]
    expected = train_alone(alone, pairs, lambda model, ids: nn.functional.cross_entropy(model(ids), ids))
    batches = list(loader)
    assert {batch["ids"].shape[1] for batch in batches} <= set(LENGTHS)
    assert torch.cat([fleet.step(batch) for batch in batches]).tolist() == pytest.approx(expected, rel=1e-12)
