"""Your own images, in a folder: train/CLASS/*.jpg and val/CLASS/*.jpg, or CLASS/*.jpg alone.

python -m mixedres.main --config=configs/folder.py:fp16 --config.data.dir=DIR

ResNet-18 from random weights, 60 epochs with a cosine schedule. The number of classes comes from the data. Without
val/, a fifth of every class is held out for testing (config.data.eval_fraction), always the same images. For about
100,000 images or more use model=resnet50,model.zero_init_last=true; for small images use
data.image_size=64,model=cifar_resnet20. Blocks that begin as the identity (zero_init_last) learn less in few steps:
after 540 steps on 576 crops of 36 photographs 89.2 instead of 93.2 %, the means of five seeds
(python -m experiments.photographs --contenders=ours --set=model.zero_init_last=True).

Hardware: one GPU. On two CPU cores, seven photographs are learned from 336 crops at 32 pixels in 40 seconds, with
96 % on 84 other crops (docs/photographs.md).
"""

from mixedres import config as base


def get_config(argument: str = "fp32"):
    """Returns the config for PRESET[,key=value...]."""
    config = base.defaults()
    config.epochs = 60
    config.batch_size = 64
    config.label_smoothing = 0.1
    config.log_every = 20
    config.data.name = "folder"
    config.data.image_size = 224
    config.data.flip = True
    config.model.name = "resnet18"
    config.model.zero_init_last = False
    config.optimizer.learning_rate = 0.05
    config.optimizer.lr_reference_batch = 64
    config.optimizer.nesterov = True
    config.optimizer.weight_decay = 5e-4
    config.schedule.name = "cosine"
    config.schedule.warmup = 3
    return base.finish(config, *base.split(argument))
