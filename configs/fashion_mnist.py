"""Fashion-MNIST with ResNet-20: the recipe of Random Erasing (Zhong et al., 2017, arXiv 1708.04896).

python -m mixedres.main --config=configs/fashion_mnist.py:bf16 --config.data.dir=/usr/share/datasets/fashion-mnist
python -m mixedres.main --config=configs/fashion_mnist.py:bf16,data.erasing=0 --config.data.dir=DIR
python -m mixedres.main --config=configs/fashion_mnist.py:fp16,epochs=15 --config.schedule.boundaries=7.5,11.25 ...

DIR holds MNIST's four files, train-images-idx3-ubyte and so on, packed or not. On Debian and Ubuntu
`apt-get install dataset-fashion-mnist` brings them. MNIST and KMNIST train in the same way; for EMNIST name the files:
data.train_split=emnist-letters-train,data.eval_split=emnist-letters-test.

SGD with momentum 0.9 and rate 0.1, divided by 10 after 150 and 225 of 300 epochs; batch 128; weight decay 5e-4 on all
parameters; images padded by 4, cropped, flipped, and with probability 0.5 a rectangle of 2 to 40 % is erased.

The paper reports test errors of 4.02 %, and 4.39 % without erasing, of the best epoch; ResNet-32 has 3.80 and 4.16 %.
Here ResNet-20 with erasing, in bf16, has 4.50 % in its best epoch and 4.71 % in the last. Which difference matters is
not known. The paper's program computes in float32. It fills the rectangle with one gray value, this one with random
pixels. It draws the ratio of the sides from a uniform distribution; this one draws the logarithm of the ratio. It
trains on the last, smaller batch of an epoch; this one leaves that batch out. Its weights of the head begin larger.
After 15 epochs these differences do not matter: its network and erasing in PyTorch have 6.71 %, this recipe in float32
has 6.81 % (one run each; neither trained on the last batches).

Hardware: one GPU, or two CPU cores for three and a half hours (bf16, with AVX512-BF16).
"""

from mixedres import config as base


def get_config(argument: str = "fp32"):
    """Returns the Fashion-MNIST config for PRESET[,key=value...]."""
    config = base.defaults()
    config.epochs = 300
    config.batch_size = 128
    config.log_every = 100
    config.data.name = "idx"
    config.data.image_size = 28
    config.data.pad = 4
    config.data.flip = True
    config.data.erasing = 0.5
    config.model.name = "cifar_resnet20"
    config.model.kernel_init = "he_normal_fan_out"
    config.model.zero_init_last = False
    config.optimizer.learning_rate = 0.1
    config.optimizer.lr_reference_batch = 0
    config.optimizer.weight_decay = 5e-4
    config.optimizer.decay_mask = "."
    config.schedule.name = "piecewise"
    config.schedule.boundaries = (150, 225)
    config.schedule.factors = (0.1, 0.01)
    return base.finish(config, *base.split(argument))
