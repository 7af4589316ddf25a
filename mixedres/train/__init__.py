"""A training run: build, step, loop, evaluation."""

from mixedres.train import distributed, start, steps
from mixedres.train.builder import build
from mixedres.train.debug import diagnosis, monitor, nonfinite
from mixedres.train.evaluation import compare_presets, evaluate
from mixedres.train.experiment import Experiment
from mixedres.train.run import fit
from mixedres.train.step import TrainState

__all__ = [
    "Experiment",
    "TrainState",
    "build",
    "compare_presets",
    "diagnosis",
    "distributed",
    "evaluate",
    "fit",
    "monitor",
    "nonfinite",
    "start",
    "steps",
]
