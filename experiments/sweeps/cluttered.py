"""Does half precision cost a tenth of a point? Cluttered digits in six presets, and what rounding alone makes of them.

XLA_FLAGS=--xla_force_host_platform_device_count=2 python -m experiments.sweep --sweep=experiments/sweeps/cluttered.py
--jobs=2
python -m experiments.report --evidence runs/sweeps/cluttered --name=cluttered --doctor

Seed by seed all runs begin with the same weights and see the same images. 'fp32' on two devices, with batch statistics
over both, computes the same in another order of summation: what differs is rounding. A loss scale of 2**-10 must fail,
which five seeds show. Two and a half minutes a run on one CPU core; more seeds make the intervals narrower. Machines
and days can share the seeds: --only='seed=(18|19|2.),' here, and --add=FILE of the earlier evidence there.
"""

from experiments.lib.plan import Sweep

SEEDS = 40
ONE = {"num_devices": 1, "batch_norm.sync": False}
CASES = (
    {"preset": "fp32", **ONE},
    {"preset": "fp32", "num_devices": 2, "batch_norm.sync": True},
    *({"preset": preset, **ONE} for preset in ("bf16", "fp16", "fp16_static", "fp16_rewrite", "bf16_rewrite")),
)
MUST_FAIL = {"preset": "fp16_static", **ONE, "precision.loss_scale": 2.0**-10}

SWEEP = Sweep(
    question="Does half precision cost a tenth of a point on cluttered digits?",
    base="experiments/lib/cluttered_digits.py",
    runs=[
        *({"seed": seed, **case} for seed in range(SEEDS) for case in CASES),
        *({"seed": seed, **MUST_FAIL} for seed in range(5)),
    ],
    baseline=CASES[0],
)
