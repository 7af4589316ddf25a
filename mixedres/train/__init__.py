"""A training run: plan, step, loop, evaluation."""

from typing import TYPE_CHECKING

from mixedres._internal.lazy import importer

if TYPE_CHECKING:
    from mixedres.train import start
    from mixedres.train.debug import diagnosis, monitor, nonfinite
    from mixedres.train.evaluation import OnEvaluation, OnResults, OnStep, compare_presets, evaluate
    from mixedres.train.experiment import Experiment
    from mixedres.train.metrics.trackers import Histogram
    from mixedres.train.planning import Plan, plan
    from mixedres.train.run import fit
    from mixedres.train.step import TrainState

__all__ = [
    "Experiment",
    "Histogram",
    "OnEvaluation",
    "OnResults",
    "OnStep",
    "Plan",
    "TrainState",
    "compare_presets",
    "diagnosis",
    "evaluate",
    "fit",
    "monitor",
    "nonfinite",
    "plan",
    "start",
]

__getattr__ = importer(__name__)
