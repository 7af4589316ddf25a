"""Which loss scale does float16 need? The digits in batches of 479, so that gradients are small.

python -m experiments.sweep --sweep=experiments/sweeps/loss_scale.py --jobs=2

The mean over 479 images makes the gradient of each a 479th: without a loss scale float16 rounds 82 % of the gradients
of the convolutions' outputs to zero at the start (docs/experiments.md), and more as the loss falls. Scales below
1 stand for gradients that are smaller still, those of larger images and batches.
"""

from experiments.lib.plan import Sweep

SCALES = (2.0**-8, 2.0**-4, 2**4, 2**8, 2**15, "dynamic")

SWEEP = Sweep(
    question="Which loss scale does float16 need where gradients are small?",
    base="configs/digits.py",
    overrides={
        "model.name": "cifar_resnet8",
        "batch_size": 479,
        "epochs": 40,
        "label_smoothing": 0.0,
        "optimizer.learning_rate": 0.2,
    },
    runs=[
        {"preset": "fp32", "seed": seed}
        if scale is None
        else {"preset": "fp16", "precision.loss_scale": scale, "seed": seed}
        for seed in range(2)
        for scale in (None, "none", *SCALES)
    ],
    baseline={"preset": "fp32"},
)
