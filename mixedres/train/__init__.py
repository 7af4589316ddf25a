"""A training run: build, step, loop, evaluation."""

from mixedres.train.builder import build
from mixedres.train.evaluation import compare, evaluate
from mixedres.train.experiment import Experiment
from mixedres.train.run import train
from mixedres.train.step import TrainState

__all__ = ["Experiment", "TrainState", "build", "compare", "evaluate", "train"]
