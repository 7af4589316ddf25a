"""The same on a deeper network: ResNet-50 v1.5 on cluttered digits of 64 pixels, one run each of four presets.

python -m experiments.sweep --sweep=experiments/sweeps/cluttered_resnet50.py

One run shows that a curve does not leave that of float32, and no tenth of a point: `cluttered.py` is for that. Two
cores take half an hour a run.
"""

from experiments.plan import Sweep

SWEEP = Sweep(
    question="Does a ResNet-50 in half precision follow float32's curve?",
    base="configs/cluttered.py",
    overrides={"model.name": "resnet50", "data.image_size": 64, "epochs": 60, "checkpoint_every": "10 epochs"},
    axes={"preset": ("fp32", "bf16", "fp16", "fp16_rewrite")},
    baseline={"preset": "fp32"},
)
