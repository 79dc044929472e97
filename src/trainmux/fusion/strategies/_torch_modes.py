"""The one private torch API that measuring needs (torch 2.11 to 2.13).

Strategies are chosen while a graph is being written: every operator called then is only recorded, on fake
tensors. To time something on the device, that has to stop for a moment. A second thread would do as well,
but cuDNN's own measurements are kept per thread, and the step that is captured later would repeat them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def real_tensors() -> Iterator[None]:
    """While active, operators run on the device again, unrecorded and without gradients."""
    with _disable_current_modes(), torch.no_grad():
        yield
