"""The ResNet family and batch normalization in NumPy float64, written from their definitions.

Shares with the code under test the names of parameters and options and nothing else. Images are NHWC, convolution
kernels HWIO. Sources: He et al., arXiv 1512.03385 (v1) and 1603.05027 (v2), with the stride of a v1.5 bottleneck on its
3x3; Ioffe and Szegedy, arXiv 1502.03167, algorithm 1.
"""

import jax
import numpy as np


def conv(x, kernel, stride, padding="pytorch"):
    """Cross-correlation with zeros around the map."""
    size = kernel.shape[0]
    x = _padded(x, size, stride, padding, 0)
    return np.einsum("bhwcij,ijco->bhwo", _windows(x, size, stride), kernel, optimize=True)


def max_pool(x, padding="pytorch"):
    """3x3 of stride 2; the border never wins."""
    return _windows(_padded(x, 3, 2, padding, -np.inf), 3, 2).max(axis=(-2, -1))


def _padded(x, size, stride, padding, value):
    """(k - 1) / 2 on each side; tensorflow: what a window every `stride` rows needs in all, the odd row at the end."""
    if padding == "pytorch":
        around = [((size - 1) // 2,) * 2] * 2
    else:
        needed = [max(size - (n % stride or stride), 0) for n in x.shape[1:3]]
        around = [(n // 2, (n + 1) // 2) for n in needed]
    return np.pad(x, ((0, 0), *around, (0, 0)), constant_values=value)


def _windows(x, size, stride):
    return np.lib.stride_tricks.sliding_window_view(x, (size, size), axis=(1, 2))[:, ::stride, ::stride]


def relu(x):
    return np.maximum(x, 0)


def batch_norm_eval(x, scale, bias, mean, var, epsilon):
    return scale * (x - mean) / np.sqrt(var + epsilon) + bias


def batch_norm_train(x, scale, bias, running_mean, running_var, momentum, epsilon, unbiased=True):
    """(output, new running mean, new running variance); what is stored is the unbiased variance."""
    axes = tuple(range(x.ndim - 1))
    mean = x.mean(axes)
    y = batch_norm_eval(x, scale, bias, mean, ((x - mean) ** 2).mean(axes), epsilon)
    new_mean = momentum * running_mean + (1 - momentum) * mean
    return y, new_mean, momentum * running_var + (1 - momentum) * x.var(axes, ddof=int(unbiased))


class ResNet:
    """One forward pass; `activations` and, in training, `batch_stats` are filled on the way.

    `model` has the sizes, the version and the options alone.
    """

    def __init__(self, model, variables, train=False):
        float64 = jax.tree.map(np.float64, variables)
        self.params, self.batch_stats = float64["params"], float64["batch_stats"]
        self.model, self.train, self.activations = model, train, {}
        self.convs_per_block = 3 if "conv3" in self.params["block_layer1_1"] else 2

    def __call__(self, images):
        x = np.asarray(images, np.float64)
        x = conv(x, self.params["stem_conv"]["kernel"], 1 if self.model.small_images else 2)
        self.activations["initial_conv"] = x
        if self.model.version != "2":
            x = relu(self._norm(x, "stem_norm"))
        if not self.model.small_images:
            x = self.activations["initial_max_pool"] = max_pool(x, self.model.pool_padding)
        block = self._preactivated if self.model.version == "2" else self._postactivated
        for stage, blocks in enumerate(self.model.stage_sizes, start=1):
            for index in range(1, blocks + 1):
                stride = 2 if stage > 1 and index == 1 else 1
                x = block(x, f"block_layer{stage}_{index}", stride)
            self.activations[f"block_layer{stage}"] = x
        if self.model.version == "2":
            x = relu(self._norm(x, "final_norm"))
        x = self.activations["final_reduce_mean"] = x.mean((1, 2))
        head = self.params["head"]
        x = self.activations["final_dense"] = x @ head["kernel"] + head["bias"]
        return x

    def _strides(self, stride):
        """The stride of each convolution on the residual branch."""
        if self.convs_per_block == 2:
            return (stride, 1)
        return (stride, 1, 1) if self.model.version == "1" else (1, stride, 1)

    def _postactivated(self, x, block, stride):
        y = x
        last = self.convs_per_block
        for i, conv_stride in enumerate(self._strides(stride), start=1):
            y = conv(y, self.params[block][f"conv{i}"]["kernel"], conv_stride, self.model.padding)
            y = self._norm(y, block, f"norm{i}")
            y = y if i == last else relu(y)
        if "conv_proj" in self.params[block]:
            x = conv(x, self.params[block]["conv_proj"]["kernel"], stride)
            x = self._norm(x, block, "norm_proj")
        return relu(x + y)

    def _preactivated(self, x, block, stride):
        y = x
        for i, conv_stride in enumerate(self._strides(stride), start=1):
            activated = relu(self._norm(y, block, f"norm{i}"))
            if i == 1 and "conv_proj" in self.params[block]:
                x = conv(activated, self.params[block]["conv_proj"]["kernel"], stride)
            y = conv(activated, self.params[block][f"conv{i}"]["kernel"], conv_stride, self.model.padding)
        return x + y

    def _norm(self, x, *path):
        params, stats = self.params, self.batch_stats
        for name in path:
            params, stats = params[name], stats[name]
        affine = params["scale"], params["bias"]
        if not self.train:
            return batch_norm_eval(x, *affine, stats["mean"], stats["var"], self.model.epsilon)
        y, stats["mean"], stats["var"] = batch_norm_train(
            x, *affine, stats["mean"], stats["var"], self.model.momentum, self.model.epsilon
        )
        return y
