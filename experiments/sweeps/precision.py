"""Does half precision cost accuracy? The digits in five presets and with five seeds.

python -m experiments.sweep --sweep=experiments/sweeps/precision.py --jobs=2

25 runs, a quarter of an hour on two CPU cores.
"""

from experiments.lib.plan import Sweep

SWEEP = Sweep(
    question="Does half precision cost accuracy on the digits?",
    base="configs/digits.py",
    overrides={"model.name": "cifar_resnet20", "epochs": 14},
    axes={"seed": range(5), "preset": ("fp32", "bf16", "fp16", "fp16_static", "fp16_rewrite")},
    baseline={"preset": "fp32"},
)
