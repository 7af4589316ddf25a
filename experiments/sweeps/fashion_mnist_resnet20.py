"""The recipe of Random Erasing on Fashion-MNIST in 15 epochs instead of 300, one run each of four presets.

python -m experiments.sweep --sweep=experiments/sweeps/fashion_mnist_resnet20.py --jobs=2
python -m experiments.report runs/sweeps/fashion_mnist_resnet20 --name=fashion_mnist_resnet20

One run shows that a curve follows that of float32, and no quarter of a point: `fashion_mnist.py` is for that. The
learning rate falls after half and three quarters of the epochs, as in the paper. One to two hours a run on one CPU
core, of which --jobs=2 uses two.
"""

from experiments.lib.plan import Sweep

SWEEP = Sweep(
    question="Does a ResNet-20 in half precision follow float32's curve on Fashion-MNIST?",
    base="configs/fashion_mnist.py",
    overrides={
        "data.dir": "/usr/share/datasets/fashion-mnist",
        "epochs": 15,
        "schedule.boundaries": (7.5, 11.25),
    },
    axes={"preset": ("fp32", "bf16", "fp16", "fp16_rewrite")},
    baseline={"preset": "fp32"},
)
