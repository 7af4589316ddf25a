"""Which loss scale does float16 need? See experiments.plan for what a sweep is."""

from experiments.plan import Sweep

SWEEP = Sweep(
    question="Which loss scale does float16 need on the digits?",
    base="configs/digits.py",
    axes={"seed": range(3)},
    runs=[],
    baseline={"preset": "fp32"},
)
