"""The same on a deeper network: ResNet-50 v1.5 on cluttered digits of 64 pixels, one run each of four presets.

python -m experiments.sweep --sweep=experiments/sweeps/cluttered_resnet50.py --jobs=2
python -m experiments.report runs/sweeps/cluttered_resnet50 --name=cluttered_resnet50

One run shows that a curve does not leave that of float32, and no tenth of a point: `cluttered.py` is for that. Half an
hour a run on one CPU core, of which --jobs=2 uses two.
"""

from experiments.lib.plan import Sweep

SWEEP = Sweep(
    question="Does a ResNet-50 in half precision follow float32's curve?",
    base="experiments/lib/cluttered_digits.py",
    overrides={"model.name": "resnet50", "data.image_size": 64, "epochs": 20, "log_every": 20},
    axes={"preset": ("fp32", "bf16", "fp16", "fp16_rewrite")},
    baseline={"preset": "fp32"},
)
