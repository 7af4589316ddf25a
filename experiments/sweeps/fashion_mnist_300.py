"""The whole recipe of Random Erasing on Fashion-MNIST: 300 epochs of a ResNet-20, with and without erasing.

python -m experiments.sweep --sweep=experiments/sweeps/fashion_mnist_300.py --only=bf16,erasing=0.5
python -m experiments.report runs/sweeps/fashion_mnist_300 --name=fashion_mnist_300

These commands make one of the four runs. In bf16 a run takes three and a half hours on two CPU cores with AVX512-BF16.
"""

from experiments.lib.plan import Sweep

SWEEP = Sweep(
    question="Does a ResNet-20 in bfloat16 reach the paper's errors on Fashion-MNIST?",
    base="configs/fashion_mnist.py",
    overrides={"data.dir": "/usr/share/datasets/fashion-mnist"},
    axes={"preset": ("fp32", "bf16"), "data.erasing": (0.5, 0.0)},
    baseline={"preset": "fp32"},
)
