"""Files of checkpoints; see docs/layout.md."""

from trainmux.training._checkpoint import checkpoint_exists, read_checkpoint, write_checkpoint

__all__ = ["checkpoint_exists", "read_checkpoint", "write_checkpoint"]
