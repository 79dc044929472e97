"""Places of what only the next node reads: a result that its operator has put elsewhere may stay there."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from trainmux.lowering import Place


@dataclass(frozen=True)
class PassingPlace(Place):
    """Memory for a value that need not come to lie there.

    A result is left where its operator has put it, if all that would look at it here find it there the same
    way.
    """

    def take(self, result: Tensor) -> Tensor:
        """``result`` as it is, or in its place."""
        storage, value = result.untyped_storage(), self.value
        lies_alike = (
            storage.data_ptr() != self.memory.untyped_storage().data_ptr()
            and storage.nbytes() >= self.memory.numel()
            and result.storage_offset() * result.element_size() == value.data_ptr() - self.memory.data_ptr()
            and result.stride() == value.stride()
        )
        return result if lies_alike else super().take(result)
