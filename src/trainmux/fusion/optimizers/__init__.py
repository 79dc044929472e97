"""Torch optimizers as fused updates with per-member hyper-parameters."""

from trainmux.fusion.optimizers._describe import (
    GroupStructure,
    OptimizerStructure,
    check_hyperparameters,
    describe,
    rule_of,
)
from trainmux.fusion.optimizers._families import FAMILIES
from trainmux.fusion.optimizers._rule import scalar_dtype
from trainmux.fusion.optimizers._state import read_state, read_steps, state_entries, write_state
from trainmux.fusion.optimizers._traced import StateEntry
from trainmux.fusion.optimizers._update import (
    SettingColumns,
    apply_update,
    idle_decisions,
    idle_settings,
    is_elementwise,
    scalar_values,
)
