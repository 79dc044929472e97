"""Counter-based random numbers: published vectors, independence of width and slot, and statistics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from trainmux.runtime import WORD_RANGE, random_words
from trainmux.runtime._random import philox_blocks, philox_pairs

INT64 = torch.iinfo(torch.int64)
int64s = st.integers(INT64.min, INT64.max)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
operators = st.integers(0, 2**31)

# Random123's kat_vectors for philox4x32 with ten rounds: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
# The same for philox2x32 with seven rounds.
KNOWN_PAIRS = [
    ("00000000 00000000", "00000000", "257a3673 cd26be2a"),
    ("ffffffff ffffffff", "ffffffff", "ab302c4d 3dc9d239"),
    ("243f6a88 85a308d3", "13198a2e", "bedbbe6b e4c770b3"),
]


def parsed(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def scalars(values: list[int]) -> list[Tensor]:
    return [torch.tensor(value, dtype=torch.int64) for value in values]


def words_of(seed: int, counter: int, operator: int, shape: tuple[int, ...]) -> Tensor:
    return random_words(*scalars([seed, counter]), operator, list(shape))


def test_published_known_answers() -> None:
    for counter, key, expected in KNOWN_ANSWERS:
        words = philox_blocks(scalars(parsed(counter)), scalars(parsed(key)))
        assert [word.item() for word in words] == parsed(expected)
    for counter, key, expected in KNOWN_PAIRS:
        words = philox_pairs(scalars(parsed(counter)), *scalars(parsed(key)))
        assert [word.item() for word in words] == parsed(expected)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=int64s, counter=int64s, operator=operators, element=st.integers(0, 100))
def test_an_element_is_the_first_word_of_its_pair_in_the_stream(
    seed: int, counter: int, operator: int, element: int
) -> None:
    place = [operator, counter % 2**32, (counter >> 32) % 2**32, 0]
    key, high, _, _ = philox_blocks(scalars(place), scalars([seed % 2**32, (seed >> 32) % 2**32]))
    words = words_of(seed, counter, operator, (element + 1,))
    assert words[element] == philox_pairs([torch.tensor(element), high], key)[0]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    members=st.lists(st.tuples(int64s, int64s), min_size=1, max_size=5),
    operator=operators,
    shape=shapes,
    data=st.data(),
)
def test_a_member_draws_the_same_at_any_width_and_in_any_slot(
    members: list[tuple[int, int]], operator: int, shape: tuple[int, ...], data: st.DataObject
) -> None:
    alone = [words_of(seed, counter, operator, shape) for seed, counter in members]
    order = data.draw(st.permutations(range(len(members))))
    seeds, counters = torch.tensor([members[i] for i in order], dtype=torch.int64).unbind(1)
    together = random_words(seeds, counters, operator, list(shape))
    assert together.shape == (len(members), *shape)
    for slot, member in enumerate(order):
        assert torch.equal(together[slot], alone[member])


def test_the_shape_only_arranges_the_elements_and_torch_draws_nothing() -> None:
    before = torch.get_rng_state()
    for numel in (1, 2, 5, 8, 13):
        assert torch.equal(words_of(3, 1, 2, (numel,)), words_of(3, 1, 2, (30,))[:numel])
    assert torch.equal(words_of(3, 1, 2, (3, 5, 2)).flatten(), words_of(3, 1, 2, (30,)))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("seed", "counter", "operator"), [(0, 0, 0), (-7, 2**40, 12)])
def test_words_are_uniform(seed: int, counter: int, operator: int) -> None:
    words = words_of(seed, counter, operator, (1 << 16,)).numpy()
    assert stats.kstest(words / WORD_RANGE, "uniform").pvalue > 1e-3
    for shift in (24, 16, 8, 0):
        counts = np.bincount((words >> shift) & 0xFF, minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize("axis", ["seed", "counter", "operator", "element"])
def test_neighbouring_streams_and_elements_are_uncorrelated(axis: str) -> None:
    num_streams, numel = 24, 4096
    if axis == "element":
        streams = words_of(9, 9, 9, (num_streams + numel - 1,)).unfold(0, numel, 1).double()
    else:
        places = [{"seed": 5, "counter": 5, "operator": 5} | {axis: index} for index in range(num_streams)]
        streams = torch.stack([words_of(**place, shape=(numel,)) for place in places]).double()
    off_diagonal = torch.corrcoef(streams)[~torch.eye(num_streams, dtype=torch.bool)]
    assert off_diagonal.abs().max() < 4.5 / math.sqrt(numel)


@pytest.mark.parametrize(
    ("shape", "width"), [((), None), ((7,), 3), ((2, 3), None), ((0,), 3), ((3, 0), None)]
)
def test_holds_to_the_contract_of_a_custom_operator(shape: tuple[int, ...], width: int | None) -> None:
    seed = torch.arange(3) if width else torch.tensor(1)
    assert random_words(seed, seed + 1, 4, list(shape)).shape == (*seed.shape, *shape)
    torch.library.opcheck(
        random_words, (seed, seed + 1, 4, list(shape)), test_utils=("test_schema", "test_faketensor")
    )
