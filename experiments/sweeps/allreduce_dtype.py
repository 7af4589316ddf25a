"""Does averaging the gradients in half precision cost accuracy? The digits on eight devices.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m experiments.sweep \
    --sweep=experiments/sweeps/allreduce_dtype.py
"""

from experiments.lib.plan import Sweep

SWEEP = Sweep(
    question="Does an all-reduce of half the bytes cost accuracy on the digits?",
    base="configs/digits.py",
    overrides={"model.name": "cifar_resnet20", "epochs": 14, "num_devices": 8, "batch_norm.sync": True},
    axes={"seed": range(3), "preset": ("bf16", "fp16"), "allreduce_dtype": ("param", "compute")},
    baseline={"allreduce_dtype": "param"},
)
