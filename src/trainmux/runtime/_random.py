"""Random numbers as a function of counters: Philox.

A draw depends on (member seed, member step, operator, element) and on nothing else, so it is the
same at any width, in any slot, on any device, after a resume and in a recomputation.

Two generators in a row. Philox 4x32 with ten rounds turns (seed, step, operator) into 64 bits that name
a stream, once per member and draw. Philox 2x32 with seven rounds, the fewest that pass its authors'
tests, turns (stream, element) into the element's word: this one runs for every element, inside a kernel
that is otherwise bound by memory: seven multiplications instead of twenty.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011) defines both; their published test
vectors are in the tests. Everything is int64 arithmetic with wrap-around, which torch has on every
device; the products of two 32-bit words keep their 64 bits exactly that way.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS_OF_PAIRS = 7
_MULTIPLIER_OF_PAIRS = 0xD256D193
WORD_RANGE = 2**32


def philox_blocks(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four 32-bit words (in int64 tensors) of each block. Inputs broadcast and hold 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left = c0 * _MULTIPLIERS[0]
        right = c2 * _MULTIPLIERS[1]
        # The shift is arithmetic: masking drops the copies of the sign bit.
        c0, c1, c2, c3 = (
            ((right >> 32) & _WORD) ^ c1 ^ k0,
            right & _WORD,
            ((left >> 32) & _WORD) ^ c3 ^ k1,
            left & _WORD,
        )
        k0 = (k0 + _KEY_STEPS[0]) & _WORD
        k1 = (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def philox_pairs(
    counter: Sequence[Tensor], key: Tensor, *, rounds: int = _ROUNDS_OF_PAIRS
) -> tuple[Tensor, Tensor]:
    """The two 32-bit words (in int64 tensors) of each pair. Inputs broadcast and hold 32-bit words."""
    c0, c1 = counter
    for _ in range(rounds):
        product = c0 * _MULTIPLIER_OF_PAIRS
        c0, c1 = ((product >> 32) & _WORD) ^ c1 ^ key, product & _WORD
        key = (key + _KEY_STEPS[0]) & _WORD
    return c0, c1


def random_words_of_elements(seed: Tensor, counter: Tensor, operator: int, shape: Sequence[int]) -> Tensor:
    """``random_words`` as plain operators, each element by itself: what a compiler fuses."""
    zero = torch.zeros((), dtype=torch.int64, device=seed.device)
    stream = philox_blocks(
        (zero + operator, counter & _WORD, (counter >> 32) & _WORD, zero),
        (seed & _WORD, (seed >> 32) & _WORD),
    )
    key, high = (word.reshape([*seed.shape, *[1] * len(shape)]) for word in stream[:2])
    element = torch.arange(prod(shape), dtype=torch.int64, device=seed.device).reshape(list(shape))
    return philox_pairs((element & _WORD, high ^ (element >> 32)), key)[0]


@torch.library.custom_op("trainmux::random_words", mutates_args=())
def random_words(seed: Tensor, counter: Tensor, operator: int, shape: Sequence[int]) -> Tensor:
    """Uniform 32-bit words in an int64 tensor of shape ``seed.shape + shape``.

    ``seed`` and ``counter`` are int64 of one shape: ``[]`` for one member, ``[k]`` for k of them. One node
    to a graph, so that the split into forward and backward saves masks instead of drawing twice.
    """
    return random_words_of_elements(seed, counter, operator, shape).contiguous()


@random_words.register_fake
def _(seed: Tensor, counter: Tensor, operator: int, shape: Sequence[int]) -> Tensor:
    return seed.new_empty((*seed.shape, *shape), dtype=torch.int64)
