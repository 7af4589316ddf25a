"""Does it cost accuracy to fuse batch norms with what follows them? The digits in three presets and with five seeds.

python -m experiments.sweep --sweep=experiments/sweeps/fused.py --jobs=2

30 runs, a third of an hour on two CPU cores.
"""

from experiments.lib.plan import Sweep

SWEEP = Sweep(
    question="Do fused norms cost accuracy on the digits?",
    base="configs/digits.py",
    overrides={"model.name": "cifar_resnet20", "epochs": 14},
    axes={"seed": range(5), "preset": ("fp32", "bf16", "fp16"), "model.fused": ("false", "true")},
    baseline={"model.fused": "false"},
)
