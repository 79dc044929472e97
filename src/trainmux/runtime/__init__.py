"""Device facts and primitives: random counters, stacked storage, determinism, ways from host to device."""

from trainmux.runtime._allocations import AllocationEvent, record_allocations
from trainmux.runtime._capturing import capturing, no_collections
from trainmux.runtime._determinism import deterministic_algorithms, measured_convolutions
from trainmux.runtime._gpu import (
    CudaFacts,
    DriverFacts,
    GpuFacts,
    ListedGpu,
    ask_driver,
    look_at_cuda,
    probe_memory,
)
from trainmux.runtime._host import FolderFacts, HostFacts, look_at_folder, look_at_host
from trainmux.runtime._interrupts import deferred_interrupts
from trainmux.runtime._kept_files import device_name, private_folder, source_version, user_cache_folder
from trainmux.runtime._landing import NUM_LANDINGS, HostLeaf, Landing
from trainmux.runtime._pools import limited_growth, pool_bytes, release_cached
from trainmux.runtime._process import ignored_warnings, process_lock
from trainmux.runtime._random import (
    WORD_RANGE,
    philox_blocks,
    philox_pairs,
    random_words,
    random_words_of_elements,
)
from trainmux.runtime._ring import HostFeed
from trainmux.runtime._storage import ALIGNMENT_BYTES, stacked_strides, stacked_zeros, storage_bytes
from trainmux.runtime._streams import (
    MATRIX_LIBRARIES_BYTES,
    StreamOwner,
    borrow_stream,
    borrowed_stream,
    num_streams_known,
    return_stream,
    warm_matrix_libraries,
    workspaces_bytes,
)
from trainmux.runtime._transfer import Transfers

__all__ = [
    "ALIGNMENT_BYTES",
    "MATRIX_LIBRARIES_BYTES",
    "NUM_LANDINGS",
    "WORD_RANGE",
    "AllocationEvent",
    "CudaFacts",
    "DriverFacts",
    "FolderFacts",
    "GpuFacts",
    "HostFacts",
    "HostFeed",
    "HostLeaf",
    "Landing",
    "ListedGpu",
    "StreamOwner",
    "Transfers",
    "ask_driver",
    "borrow_stream",
    "borrowed_stream",
    "capturing",
    "deferred_interrupts",
    "deterministic_algorithms",
    "device_name",
    "ignored_warnings",
    "limited_growth",
    "look_at_cuda",
    "look_at_folder",
    "look_at_host",
    "measured_convolutions",
    "no_collections",
    "num_streams_known",
    "philox_blocks",
    "philox_pairs",
    "pool_bytes",
    "private_folder",
    "probe_memory",
    "process_lock",
    "random_words",
    "random_words_of_elements",
    "record_allocations",
    "release_cached",
    "return_stream",
    "source_version",
    "stacked_strides",
    "stacked_zeros",
    "storage_bytes",
    "user_cache_folder",
    "warm_matrix_libraries",
    "workspaces_bytes",
]
