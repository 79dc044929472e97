"""While transformers is traced, have it compute as in plain torch, not as in code that is compiled.

A trace tells code that asks that it is being compiled, so that it reads no values. transformers then also
computes in other ways, which need not give the same results.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from trainmux.tracing._passes import constant_value
from trainmux.tracing._torch_private import replaced, traced_module, traced_node


@contextmanager
def transformers_as_in_eager() -> Iterator[None]:
    """While active, the thread that traces has these functions of transformers answer as in plain torch.

    - Groups of rows are multiplied by torch's operator in every precision, not by a loop on the host.
    - Masks that no input decides are left out where attention has them built in. Code that is compiled does
      not look at them, and before 5.18 builds them even where none was given: Doge and UMT5 then hide from
      attention what they do not hide in plain torch.
    """
    with ExitStack() as stack:
        experts: Any = sys.modules.get("transformers.integrations.moe")
        if hasattr(experts, "_can_use_grouped_mm"):
            stack.enter_context(replaced(experts, _can_use_grouped_mm=lambda *args: True))
        masks: Any = sys.modules.get("transformers.masking_utils")
        if hasattr(masks, "is_tracing"):
            stack.enter_context(replaced(masks, is_tracing=_depends_on_inputs))
        yield


def _depends_on_inputs(value: Tensor | None = None) -> bool:
    """Whether a tensor of traced code has other values in other steps."""
    if value is None:
        return False
    node = traced_node(value)
    return node is not None and constant_value(traced_module(), node) is None
