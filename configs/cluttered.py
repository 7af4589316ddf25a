"""Cluttered digits: handwritten digits, distorted, in noise and among fragments of others; hard for a ResNet-20.

python -m mixedres.main --config=configs/cluttered.py:fp16

Expected: 93.9 % of the 10,800 test images in every preset; 0.4 is the standard deviation over seeds (docs/results.md).
Hardware: three minutes on one CPU core.
"""

from mixedres import config as base


def get_config(argument: str = "fp32"):
    """Returns the config of cluttered digits for PRESET[,key=value...]."""
    config = base.defaults()
    config.epochs = 20
    config.batch_size = 32
    config.eval_every = 0
    config.checkpoint_every = 0
    config.log_every = 44
    config.data.name = "cluttered_digits"
    config.data.image_size = 32
    config.model.name = "cifar_resnet20"
    config.optimizer.learning_rate = 0.1
    config.optimizer.lr_reference_batch = 0
    config.optimizer.nesterov = True
    config.optimizer.weight_decay = 1e-3
    config.schedule.name = "cosine"
    config.schedule.warmup = 1
    return base.finish(config, *base.split(argument))
