"""Fine-tuning of a trained network on your own images: train/CLASS/*.jpg and val/CLASS/*.jpg, or CLASS/*.jpg alone.

python -m mixedres.main --config=configs/finetune.py:fp16 --config.init_from=WEIGHTS --config.data.dir=DIR

WEIGHTS is the workdir of a run, a .safetensors or .pth file with the names of torchvision or timm, a folder written by
transformers, a checkpoint of TensorFlow's official ResNet, or a file of Keras (docs/weights.md). The network is the
network of the weights. If the number of classes differs, the head is initialized anew. All layers are trained for 20
epochs, from a fifth of the rate of configs/folder.py; layers near the input have lower rates (layer_decay).

  --config.trainable=^/head/ --config.batch_norm.frozen   only the head; the backbone keeps every bit
  --config.batch_norm.frozen                               all layers, normalized by the running averages of the
                                                           weights: for small batches, whose statistics are noisy
Hardware: one GPU; a few hundred images at 64 pixels take minutes on two CPU cores.
"""

from mixedres import config as base


def get_config(argument: str = "fp16"):
    """Returns the config for PRESET[,key=value...]."""
    config = base.defaults()
    config.init_from = "WEIGHTS"  # to be named
    config.epochs = 20
    config.batch_size = 64
    config.label_smoothing = 0.1
    config.log_every = 20
    config.data.name = "folder"
    config.data.image_size = 224
    config.data.flip = True
    config.model.name = "auto"  # the network of the weights
    config.optimizer.learning_rate = 0.01
    config.optimizer.lr_reference_batch = 64
    config.optimizer.nesterov = True
    config.optimizer.weight_decay = 1e-4
    config.optimizer.layer_decay = 0.9
    config.schedule.name = "cosine"
    config.schedule.warmup = 1
    return base.finish(config, *base.split(argument))
