"""Convolution, which has several ways to be fused; none is best everywhere (D2).

Each way is a file in ``strategies``: members side by side in channels (grouped), one call per member
(separate), 1x1 convolutions as products of matrices (bmm), the first two and the last with channels innermost
or not. A new way is a pair of functions, forward and backward, and a line here.
"""

from __future__ import annotations

import torch

from trainmux.fusion._stacked import strategy_rule
from trainmux.fusion.strategies import Family
from trainmux.fusion.strategies.convolution_each import SEPARATE, SEPARATE_CHANNELS_LAST, SINGLE
from trainmux.fusion.strategies.convolution_grouped import GROUPED, GROUPED_CHANNELS_LAST
from trainmux.fusion.strategies.convolution_pixels import BMM, BMM_CHANNELS_LAST, SINGLE_MM

aten = torch.ops.aten

CONVOLUTION = Family(
    "convolution",
    (
        GROUPED,
        GROUPED_CHANNELS_LAST,
        SEPARATE,
        SEPARATE_CHANNELS_LAST,
        BMM,
        BMM_CHANNELS_LAST,
        SINGLE,
        SINGLE_MM,
    ),
)
strategy_rule(CONVOLUTION, aten.convolution.default, aten.convolution_backward.default)
