"""Torch optimizers as fused updates with per-member hyper-parameters. See docs/layout.md."""

from trainmux.optim._base import ScalarSpec
from trainmux.optim._columns import SettingColumns
from trainmux.optim._describe import check_hyperparameters, describe
from trainmux.optim._registry import SUPPORTED_OPTIMIZERS
from trainmux.optim._state import read_state, read_steps, state_names, write_state
from trainmux.optim._structure import GroupStructure, OptimizerStructure
from trainmux.optim._update import (
    apply_update,
    idle_settings,
    scalar_dtype,
    scalar_specs,
    scalar_values,
    shape_scalars,
)

__all__ = [
    "SUPPORTED_OPTIMIZERS",
    "GroupStructure",
    "OptimizerStructure",
    "ScalarSpec",
    "SettingColumns",
    "apply_update",
    "check_hyperparameters",
    "describe",
    "idle_settings",
    "read_state",
    "read_steps",
    "scalar_dtype",
    "scalar_specs",
    "scalar_values",
    "shape_scalars",
    "state_names",
    "write_state",
]
