"""Estimators and a search for scikit-learn; need it when used: ``pip install 'trainmux[sklearn]'``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainmux.errors import ConfigError

if TYPE_CHECKING:
    from trainmux.search._estimators import FleetClassifier, FleetRegressor
    from trainmux.search._search_cv import FleetSearchCV

__all__ = ["FleetClassifier", "FleetRegressor", "FleetSearchCV"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from trainmux.search import _estimators, _search_cv
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "sklearn":
            raise
        raise ConfigError("expected scikit-learn, got none: pip install 'trainmux[sklearn]'") from None
    return getattr(_search_cv if name == "FleetSearchCV" else _estimators, name)
