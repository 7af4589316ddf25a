"""Any image classification data set that TensorFlow Datasets prepared, as ArrayRecord or TFRecord.

python -m mixedres.main --config=configs/tfds.py:fp16 --config.data.name=tfds:oxford_flowers102 --config.data.dir=DIR

DIR is the directory of the data sets, with DIR/oxford_flowers102/2.1.1. The default is $TFDS_DATA_DIR, or else
~/tensorflow_datasets. The recipe is the same as in configs/folder.py. Data sets with a test split and no validation
split are tested on the test split. --config.data.train_split and --config.data.eval_split take the notation of
TensorFlow Datasets, such as 'train[:90%]' and 'train[90%:]'. Set --config.data.flip=False if left and right matter
(digits, letters).

Hardware: one GPU.
"""

from mixedres import config as base


def get_config(argument: str = "fp32"):
    """Returns the config for PRESET[,key=value...]."""
    config = base.defaults()
    config.epochs = 60
    config.batch_size = 64
    config.label_smoothing = 0.1
    config.log_every = 20
    config.data.name = "tfds:oxford_flowers102"
    config.data.image_size = 224
    config.data.flip = True
    config.model.name = "resnet18"
    config.optimizer.learning_rate = 0.05
    config.optimizer.lr_reference_batch = 64
    config.optimizer.nesterov = True
    config.optimizer.weight_decay = 5e-4
    config.schedule.name = "cosine"
    config.schedule.warmup = 3
    return base.finish(config, *base.split(argument))
