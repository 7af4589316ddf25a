"""ImageNet-1k with ResNet-50 v1.5, 90 epochs, 256 images per device.

python -m mixedres.main --config=configs/imagenet.py:fp16 --config.data.dir=DATA_DIR
python -m mixedres.main --config=configs/imagenet.py:fp16 --config.data.name=synthetic --config.steps=100
python -m mixedres.main --config=configs/imagenet.py:bf16,recipe=cosine,model=resnet101

Recipes (recipe=NAME after the colon):

official   TensorFlow's ResNet with Keras policies and a custom loop: 76.15 % in float16 on 8 GPUs at batch 2048,
           counted on 49,152 of the 50,000 test images. SGD multiplies the gradient by the rate before its momentum of
           0.9. Rate 0.1 per 256 images, 5 epochs of warm-up, divided by 10 after 30, 60 and 80. TensorFlow's l2(1e-4)
           adds 1e-4 * sum(w²) to the loss, whose gradient is 2e-4 * w. Padding, 1001 outputs, pixels and the static
           loss scale of 128 in float16 are TensorFlow's.
estimator  TensorFlow's r1 ResNet: 76.26 % in float16 by graph rewrite on 8 GPUs at batch 1024. Rate 0.128 per 256
           images, divided by 10 after 30, 60, 80 and 90 epochs, which include fractions of batches. Statistics with
           momentum 0.997; class 0 is the background. TensorFlow's --resnet_version=1 is version 1.5 here, and its 2 is
           model.version=2.
lars       estimator with --enable_lars, for batches of 4096 and more. batch_size=N after the colon (default 8192) sets
           the peak of the rate and the warm-up.
cosine     NVIDIA's 90-epoch recipe for v1.5 (published: 76.9 to 77.2 % in mixed precision): rate 0.256 per 256 images,
           8 epochs of warm-up, cosine to 0, momentum 0.875, weight decay 1/32768, label smoothing 0.1, and
           data.preprocessing=torch.

official and estimator compute the same as TensorFlow's programs, to float32 rounding (tests/original).
docs/imagenet.md lists the differences, such as the random draws. data.preprocessing=official_fast takes less processor
time than their preprocessing.

DATA_DIR holds imagenet2012 as TensorFlow Datasets wrote it, in ArrayRecord or TFRecord files, or
train-?????-of-01024 and validation-?????-of-00128 of TensorFlow's models. For an unpacked copy,
train/n01440764/*.JPEG and val/n01440764/*.JPEG, use --config.data.name=folder.

Hardware: any number of GPUs; 8 GPUs have the batch of 2048. Not run here on the real images yet.
"""

from mixedres import config as base


def get_config(argument: str = "fp32"):
    """Returns the ImageNet config for PRESET[,recipe=official|estimator|lars|cosine][,key=value...]."""
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
    if recipe != "cosine" and preset.startswith("fp16"):
        config.precision.loss_scale = 128.0
    if overrides.get("batch_size", "").isdecimal():  # lars reads it
        config.batch_size = int(overrides["batch_size"])
    RECIPES[recipe](config)
    return base.finish(config, preset, overrides)


def official(config):
    """Sets the recipe of the custom loop in TensorFlow's models repository."""
    config.data.num_classes = 1001
    config.data.preprocessing = "official"
    config.data.synthetic_normalization = "raw"
    config.model.padding = "tensorflow"
    config.model.pool_padding = "tensorflow"
    config.model.projection = "stage"
    config.model.zero_init_last = False
    config.optimizer.learning_rate = 0.1
    config.optimizer.rate_in_momentum = True
    config.optimizer.weight_decay = 2e-4
    config.optimizer.decay_mask = "/kernel$|^/head/bias$"
    config.schedule.name = "piecewise"
    config.schedule.warmup = 5
    config.schedule.boundaries = (30, 60, 80)
    config.schedule.factors = (0.1, 0.01, 0.001)


def estimator(config):
    """Sets the recipe of r1 in TensorFlow's models repository."""
    official(config)
    config.data.background = True
    config.model.padding = "pytorch"
    config.model.kernel_init = "lecun_normal"
    config.model.head_init = "glorot_uniform"
    config.batch_norm.momentum = 0.997
    config.optimizer.learning_rate = 0.128
    config.optimizer.rate_in_momentum = False
    config.optimizer.weight_decay = 1e-4
    config.schedule.epoch = "fractional"
    config.schedule.boundaries = (30, 60, 80, 90)
    config.schedule.factors = (0.1, 0.01, 0.001, 1e-4)


def lars(config):
    """Sets the recipe of r1 with LARS: a peak that depends on the batch size, and a polynomial to 1e-4."""
    estimator(config)
    config.batch_size = config.batch_size or 8192
    peaks = {32768: 32.0, 16384: 25.0, 8192: 10.0, 0: 5.0}
    peak = next(peak for least, peak in peaks.items() if config.batch_size >= least)
    config.optimizer.name = "lars"
    config.optimizer.learning_rate = peak
    config.optimizer.lr_reference_batch = 0
    # r1 applies two decays, in the loss and in the optimizer; this is their sum. Norms and biases have no decay here;
    # in r1 the optimizer's decay leaves them out.
    config.optimizer.weight_decay = 2e-4
    config.optimizer.decay_mask = "/kernel$"
    config.schedule.name = "polynomial"
    config.schedule.power = 2.0
    config.schedule.end_factor = 1e-4 / peak
    config.schedule.warmup = 14 if config.batch_size >= 32768 else 5
    config.schedule.boundaries = config.schedule.factors = ()


def cosine(config):
    """Sets NVIDIA's recipe of 90 epochs."""
    config.optimizer.learning_rate = 0.256
    config.optimizer.momentum = 0.875
    config.optimizer.weight_decay = 1 / 32768
    config.label_smoothing = 0.1
    config.schedule.name = "cosine"
    config.schedule.warmup = 8


RECIPES = {"official": official, "estimator": estimator, "lars": lars, "cosine": cosine}
