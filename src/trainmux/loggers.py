"""Loggers of a search, one run per trial: callbacks for ``sweep`` and ``optuna.optimize``."""

from trainmux.search._csv_logger import CSVLogger
from trainmux.search._loggers import MLflowLogger, TensorBoardLogger, WandbLogger

__all__ = ["CSVLogger", "MLflowLogger", "TensorBoardLogger", "WandbLogger"]
