"""Configs of runs that are short enough for a test."""

from mixedres.config import config as base


def tiny(preset="fp32", **overrides):
    """A cifar_resnet8 on one synthetic batch of 16 small images: 6 steps with an evaluation after every second."""
    config = base.defaults()
    config.steps = 6
    config.batch_size = 16
    config.num_devices = 2
    config.eval_every = "2 steps"
    config.checkpoint_every = "2 steps"
    config.log_every = 1
    config.log_resources_every = 0.0
    config.data.image_size = 8
    config.data.num_classes = 10
    config.data.train_examples = 64
    config.model.name = "cifar_resnet8"
    texts = {key.replace("__", "."): str(value) for key, value in overrides.items()}
    return base.finish(config, preset, texts)
