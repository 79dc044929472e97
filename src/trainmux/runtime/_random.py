"""Random numbers as a function of counters: Philox 4x32 with ten rounds.

A draw depends on (member seed, member step, operator, element) and on nothing else, so it is the
same at any width, in any slot, on any device, after a resume and in a recomputation. Element *i* of
an operator takes word ``i % 4`` of the block whose counter is ``(i // 4, operator, step)``.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011) defines the generator; its
published test vectors are in the tests. Everything is int64 arithmetic with wrap-around, which torch
has on every device; the products of two 32-bit words keep their 64 bits exactly that way.
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


@torch.library.custom_op("trainmux::random_words", mutates_args=())
def random_words(seed: Tensor, counter: Tensor, operator: int, shape: Sequence[int]) -> Tensor:
    """Uniform 32-bit words in an int64 tensor of shape ``seed.shape + shape``.

    ``seed`` and ``counter`` are int64 of one shape: ``[]`` for one member, ``[k]`` for k of them.
    """
    numel = prod(shape)
    num_blocks = (numel + 3) // 4
    block = torch.arange(num_blocks, dtype=torch.int64, device=seed.device)
    seed, counter = seed.unsqueeze(-1), counter.unsqueeze(-1)
    zero = torch.zeros((), dtype=torch.int64, device=seed.device)
    words = philox_blocks(
        (block & _WORD, zero + operator, counter & _WORD, (counter >> 32) & _WORD),
        (seed & _WORD, (seed >> 32) & _WORD),
    )
    flat = torch.stack(words, dim=-1).flatten(-2)
    return flat[..., :numel].reshape([*seed.shape[:-1], *shape]).contiguous()


@random_words.register_fake
def _(seed: Tensor, counter: Tensor, operator: int, shape: Sequence[int]) -> Tensor:
    return seed.new_empty((*seed.shape, *shape), dtype=torch.int64)
