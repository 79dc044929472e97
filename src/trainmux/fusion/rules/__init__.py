"""One file per family of operators; importing this package registers all rules."""

from trainmux.fusion.rules import (
    attention,
    convolution,
    embedding,
    matmul,
    normalisation,
    pointwise,
    pooling,
    views,
)
