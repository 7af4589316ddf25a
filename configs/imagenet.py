"""ImageNet-1k with ResNet-50 v1.5, 90 epochs, 256 images per device.

python -m mixedres.main --config=configs/imagenet.py:fp16 --config.data.dir=DATA_DIR
python -m mixedres.main --config=configs/imagenet.py:fp16 --config.data.name=synthetic --config.steps=100
python -m mixedres.main --config=configs/imagenet.py:bf16,recipe=cosine,model=resnet101

Recipes (recipe=NAME after the colon):

official  SGD with momentum 0.9, rate 0.1 per 256 images, 5 epochs of warm-up, divided by 10 after 30, 60 and 80. The
          schedule of TensorFlow's ResNet with Keras policies and a custom loop, which published 76.15 % in float16 on
          8 GPUs at batch 2048. Its l2(1e-4) adds 1e-4 * sum(w²) to the loss, whose gradient is 2e-4 * w. Images
          are cropped and normalized as there (data.preprocessing=official).
cosine    NVIDIA's 90-epoch recipe for v1.5 (published: 76.9 to 77.2 % in mixed precision): rate 0.256 per 256 images,
          8 epochs of warm-up, cosine to 0, momentum 0.875, weight decay 1/32768, label smoothing 0.1, and
          data.preprocessing=torch.

DATA_DIR holds imagenet2012 as TensorFlow Datasets or ``python -m mixedres.data.prepare imagenet2012`` wrote it, in
ArrayRecord or TFRecord files, or train-?????-of-01024 and validation-?????-of-00128 of TensorFlow's models. An unpacked
copy, train/n01440764/*.JPEG and val/n01440764/*.JPEG, is --config.data.name=folder.

Hardware: any number of GPUs; 8 of them make the batch of 2048. Not run here on the real images yet.
"""

from mixedres import config as base


def get_config(argument: str = "fp32"):
    """The ImageNet config for PRESET[,recipe=official|cosine][,key=value...]."""
    preset, overrides = base.split(argument)
    config = base.defaults()
    config.epochs = 90
    config.batch_size_per_device = 256
    config.log_every = 100
    config.data.name = "imagenet2012"
    config.data.image_size = 224
    config.data.num_classes = 1000
    config.data.train_examples = 1_281_167
    config.data.flip = True
    config.model.name = "resnet50"
    recipe = overrides.pop("recipe", "official")
    if recipe not in RECIPES:
        raise base.ConfigError(f"recipe {recipe!r} is unknown; use one of {', '.join(RECIPES)}")
    RECIPES[recipe](config)
    return base.finish(config, preset, overrides)


def official(config):
    """The schedule and the preprocessing of the original."""
    config.data.preprocessing = "official"
    config.optimizer.learning_rate = 0.1
    config.optimizer.weight_decay = 2e-4
    config.optimizer.decay_mask = "/kernel$|^/head/bias$"
    config.model.zero_init_last = False
    config.schedule.name = "piecewise"
    config.schedule.warmup = 5
    config.schedule.boundaries = (30, 60, 80)
    config.schedule.factors = (0.1, 0.01, 0.001)


def cosine(config):
    """NVIDIA's 90 epochs."""
    config.optimizer.learning_rate = 0.256
    config.optimizer.momentum = 0.875
    config.optimizer.weight_decay = 1 / 32768
    config.label_smoothing = 0.1
    config.schedule.name = "cosine"
    config.schedule.warmup = 8


RECIPES = {"official": official, "cosine": cosine}
