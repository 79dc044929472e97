"""Facts about the device, and primitives on it: locks, switches, streams, captures, clocks, random words."""

from trainmux.runtime._capturing import allocating_from, capturing, no_collections
from trainmux.runtime._determinism import deterministic_algorithms, is_depthwise, measured_convolutions
from trainmux.runtime._driver_memory import bytes_outside_torch, device_memory
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
from trainmux.runtime._process import ignored_warnings, process_lock
from trainmux.runtime._random import WORD_RANGE, random_words, random_words_of_elements
from trainmux.runtime._storage import ALIGNMENT_BYTES, stacked_strides, stacked_zeros, storage_bytes
from trainmux.runtime._streams import (
    MATRIX_LIBRARIES_BYTES,
    StreamOwner,
    borrow_stream,
    borrowed_stream,
    return_stream,
    warm_matrix_libraries,
    workspaces_bytes,
)
from trainmux.runtime._timing import CudaTimer
