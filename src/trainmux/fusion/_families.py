"""The families of operators that can be fused in several ways, by the name a fleet's settings use."""

from __future__ import annotations

from trainmux.fusion.rules.convolution import CONVOLUTION
from trainmux.fusion.rules.matmul import MATMUL
from trainmux.fusion.rules.normalisation import BATCH_NORM

CONVOLUTION_STRATEGIES = CONVOLUTION.names
STRATEGY_FAMILIES = {family.name: family for family in (CONVOLUTION, MATMUL, BATCH_NORM)}
