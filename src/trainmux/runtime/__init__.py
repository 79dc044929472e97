"""Device facts and primitives: random counters, stacked storage, determinism, ways from host to device."""

from trainmux.runtime._allocations import AllocationEvent, record_allocations
from trainmux.runtime._determinism import deterministic_algorithms
from trainmux.runtime._interrupts import deferred_interrupts
from trainmux.runtime._landing import HostLeaf, Landing
from trainmux.runtime._random import (
    WORD_RANGE,
    philox_blocks,
    philox_pairs,
    random_words,
    random_words_of_elements,
)
from trainmux.runtime._ring import HostFeed
from trainmux.runtime._storage import ALIGNMENT_BYTES, stacked_strides, stacked_zeros
from trainmux.runtime._transfer import Transfers

__all__ = [
    "ALIGNMENT_BYTES",
    "WORD_RANGE",
    "AllocationEvent",
    "HostFeed",
    "HostLeaf",
    "Landing",
    "Transfers",
    "deferred_interrupts",
    "deterministic_algorithms",
    "philox_blocks",
    "philox_pairs",
    "random_words",
    "random_words_of_elements",
    "record_allocations",
    "stacked_strides",
    "stacked_zeros",
]
