"""Searches of Optuna studies; needs Optuna only when one is run: ``pip install 'trainmux[optuna]'``."""

from trainmux.search._optimize import optimize

__all__ = ["optimize"]
