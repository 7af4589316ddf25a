"""A training run: build, step, loop, evaluation.

Every name is imported when it is first used, so that a mistake in a config need not wait for JAX.
"""

from typing import TYPE_CHECKING

from mixedres._internal.lazy import importer

if TYPE_CHECKING:
    from mixedres.train import checks, distributed, start, steps
    from mixedres.train.builder import build
    from mixedres.train.debug import diagnosis, monitor, nonfinite
    from mixedres.train.evaluation import OnResults, compare_presets, evaluate
    from mixedres.train.experiment import Experiment
    from mixedres.train.run import fit
    from mixedres.train.step import TrainState

__all__ = [
    "Experiment",
    "OnResults",
    "TrainState",
    "build",
    "checks",
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

__getattr__ = importer(
    __name__,
    {
        "Experiment": "experiment",
        "OnResults": "evaluation",
        "TrainState": "step",
        "build": "builder",
        "compare_presets": "evaluation",
        "diagnosis": "debug.diagnosis",
        "evaluate": "evaluation",
        "fit": "run",
        "monitor": "debug.monitor",
        "nonfinite": "debug.nonfinite",
    },
)
