"""CIFAR-10 with ResNet-56: network and recipe of TensorFlow's official ResNet (its accuracy gate: 92.6 to 93.8 %).

python -m mixedres.main --config=configs/cifar10.py:fp16 --config.data.dir=DIR
python -m mixedres.main --config=configs/cifar10.py:fp16 --config.data.name=synthetic --config.steps=100
python -m mixedres.main --config=configs/cifar10.py:fp16,model.version=2,model=cifar_resnet110

SGD with momentum 0.9 and rate 0.1 per 128 images, without warm-up. The rate is divided by 10 after 91 and 136 epochs of
182; epochs include fractions of batches. Weight decay is 2e-4 on all parameters, including batch norm. float16 has a
static loss scale of 128.

The first block of the first stage has a projection, 16 to 16 channels with a norm, as in TensorFlow's network. The
network of the paper (model.projection=shape) has 288 parameters fewer. Images are padded by 4, cropped, flipped and
standardized one by one. The computation equals TensorFlow's to float32 rounding (tests/original), except for the random
draws and the epoch: 390 whole batches here, while TensorFlow begins the next epoch within a batch.

DIR holds cifar-10-binary.tar.gz or cifar-10-python.tar.gz, packed or not, or a copy of cifar10 by TensorFlow Datasets.

Hardware: one GPU. Not run here on the real images yet.
"""

from mixedres import config as base


def get_config(argument: str = "fp32"):
    """Returns the CIFAR-10 config for PRESET[,key=value...]."""
    preset, overrides = base.split(argument)
    config = base.defaults()
    config.epochs = 182
    config.batch_size = 128
    config.eval_every = 10
    config.checkpoint_every = 10
    config.log_every = 100
    config.data.name = "cifar10"
    config.data.image_size = 32
    config.data.num_classes = 10
    config.data.train_examples = 50_000
    config.data.pad = 4
    config.data.flip = True
    config.data.synthetic_normalization = "raw"
    config.model.name = "cifar_resnet56"
    config.model.version = "1"
    config.model.projection = "stage"
    config.model.zero_init_last = False
    config.model.kernel_init = "lecun_normal"
    config.model.head_init = "glorot_uniform"
    config.batch_norm.momentum = 0.997
    config.optimizer.learning_rate = 0.1
    config.optimizer.lr_reference_batch = 128
    config.optimizer.weight_decay = 2e-4
    config.optimizer.decay_mask = "."
    config.schedule.name = "piecewise"
    config.schedule.epoch = "fractional"
    config.schedule.boundaries = (91, 136, 182)
    config.schedule.factors = (0.1, 0.01, 0.001)
    if preset.startswith("fp16"):
        config.precision.loss_scale = 128.0
    return base.finish(config, preset, overrides)
