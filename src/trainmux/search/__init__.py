"""Searches: trials flow through the slots of one fleet."""

from trainmux.search._callbacks import SearchCallback
from trainmux.search._cross_validate import CrossValidation, FoldResult, cross_validate
from trainmux.search._ensemble import Ensemble, ensemble
from trainmux.search._population import PopulationBasedTraining
from trainmux.search._results import Results
from trainmux.search._seeds import seeds
from trainmux.search._splits import Bootstrap
from trainmux.search._sweep import sweep
from trainmux.search._trial import Candidate, Trial, TrialState
