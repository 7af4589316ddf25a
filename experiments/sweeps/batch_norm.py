"""Does it matter over how many images batch norm takes its statistics? The digits on eight devices.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m experiments.sweep --sweep=experiments/sweeps/batch_norm.py

On eight devices a batch of 32 leaves four images to each; with `batch_norm.sync` all see the statistics of the 32.
"""

from experiments.lib.plan import Sweep

SWEEP = Sweep(
    question="Do batch statistics per device cost accuracy on the digits?",
    base="configs/digits.py",
    overrides={"model.name": "cifar_resnet20", "epochs": 14, "num_devices": 8},
    axes={"seed": range(3), "preset": ("fp32", "fp16"), "batch_norm.sync": (False, True)},
    baseline={"batch_norm.sync": False},
)
