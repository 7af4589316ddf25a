"""ResNets: v1 and v1.5 (post-activation), v2 (pre-activation), for ImageNet- and CIFAR-sized images.

He et al., Deep Residual Learning (arXiv 1512.03385) and Identity Mappings (arXiv 1603.05027). v1.5 has the stride of a
bottleneck on its 3x3 convolution instead of the first 1x1. Padding is symmetric by default, as in PyTorch.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp

from mixedres._internal.tree import at_least_float32
from mixedres._internal.types import DType
from mixedres.models.layers import Conv, Norms, add, policy_of
from mixedres.models.operations import max_pool

ModuleFn = Callable[..., nn.Module]


class Network(nn.Module, kw_only=True):
    """A network that can be trained: the base of `ResNet`, and of networks of your own.

    ``__call__(images, train=False)`` takes images (b, h, w, c) in float32 and returns logits (b, num_classes) in the
    output dtype of the policy. The variables are 'params' and, if the network has running statistics, 'batch_stats',
    all float32. A Flax module with the same fields will do, too.

    Attributes:
      num_classes: outputs of the network.
      policy: dtypes of parameters, arithmetic and logits; float32 under a graph rewrite.
      norm_policy: dtypes of normalization; None for float32 arithmetic and a result in the compute dtype.
      precision: precision of every product ('highest' is true float32); see `jax.lax.dot_general`.
      keep_float32: regular expression of the paths of modules that compute in float32, such as '^/head$'.
    """

    num_classes: int
    policy: jmp.Policy
    norm_policy: jmp.Policy | None = None
    precision: Any = None
    keep_float32: str = ""


class Block(nn.Module):
    """Base class of the four blocks below; `project`: the shortcut has a projection even without a change of shape."""

    filters: int
    stride: int
    project: bool
    conv: ModuleFn
    norms: Norms
    zero_init_last: bool
    policy: jmp.Policy
    keep_float32: str

    @nn.nowrap
    def end(self, name: str, y: jax.Array, x: jax.Array) -> jax.Array:
        """Returns relu(norm(y) + x), for v1; `x` may be projected."""
        dtype = policy_of(self).compute_dtype
        init = nn.initializers.zeros if self.zero_init_last else nn.initializers.ones
        if x.shape == y.shape and not self.project:
            return self.norms.add_relu(name, y, x, dtype, scale_init=init)
        z = self.conv(y.shape[-1], 1, self.stride, name="conv_proj")(x)
        return self.norms.pair_add_relu(name, y, "norm_proj", z, dtype, scale_init=init)

    @nn.nowrap
    def sum(self, y: jax.Array, x: jax.Array, activated: jax.Array) -> jax.Array:
        """Returns y + x, for v2; x may be replaced by the projection of `activated`."""
        if x.shape != y.shape or self.project:
            x = self.conv(y.shape[-1], 1, self.stride, name="conv_proj")(activated)
        return add(y, x, policy_of(self).compute_dtype)


class BasicBlock(Block):
    """3x3 - 3x3 with the activation after the sum (v1 and v1.5)."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (b, h, w, c) to (b, ceil(h / stride), ceil(w / stride), filters)."""
        y = self.conv(self.filters, 3, self.stride, name="conv1")(x)
        y = self.norms.relu("norm1", y)
        y = self.conv(self.filters, 3, name="conv2")(y)
        return self.end("norm2", y, x)


class BottleneckBlock(Block):
    """1x1 - 3x3 - 1x1 with the activation after the sum: v1 if `stride_first`, else v1.5."""

    stride_first: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (b, h, w, c) to (b, ceil(h / stride), ceil(w / stride), 4 * filters)."""
        stride1, stride2 = (self.stride, 1) if self.stride_first else (1, self.stride)
        y = self.conv(self.filters, 1, stride1, name="conv1")(x)
        y = self.norms.relu("norm1", y)
        y = self.conv(self.filters, 3, stride2, name="conv2")(y)
        y = self.norms.relu("norm2", y)
        y = self.conv(4 * self.filters, 1, name="conv3")(y)
        return self.end("norm3", y, x)


class PreactBasicBlock(Block):
    """BN - ReLU - 3x3 - BN - ReLU - 3x3, sum without activation (v2); the projection sees the activated input."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (b, h, w, c) to (b, ceil(h / stride), ceil(w / stride), filters)."""
        activated = self.norms.relu("norm1", x, after_conv=False)
        y = self.conv(self.filters, 3, self.stride, name="conv1")(activated)
        y = self.norms.relu("norm2", y)
        y = self.conv(self.filters, 3, zeros=self.zero_init_last, name="conv2")(y)
        return self.sum(y, x, activated)


class PreactBottleneckBlock(Block):
    """BN - ReLU - 1x1 - BN - ReLU - 3x3 - BN - ReLU - 1x1, sum without activation (v2)."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (b, h, w, c) to (b, ceil(h / stride), ceil(w / stride), 4 * filters)."""
        activated = self.norms.relu("norm1", x, after_conv=False)
        y = self.conv(self.filters, 1, name="conv1")(activated)
        y = self.norms.relu("norm2", y)
        y = self.conv(self.filters, 3, self.stride, name="conv2")(y)
        y = self.norms.relu("norm3", y)
        y = self.conv(4 * self.filters, 1, zeros=self.zero_init_last, name="conv3")(y)
        return self.sum(y, x, activated)


class Head(nn.Module):
    """Dense layer with the product in the compute dtype and the bias added in float32.

    The gradient of a bias added in float16, as in flax's Dense, would be a float16 sum over the batch.
    """

    num_classes: int
    policy: jmp.Policy
    kernel_init: Callable[..., Any]
    precision: Any
    keep_float32: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (b, features) to (b, num_classes), in the compute dtype."""
        policy = policy_of(self)
        param_dtype, compute_dtype = policy.param_dtype, policy.compute_dtype
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.num_classes), param_dtype)
        bias = self.param("bias", nn.initializers.zeros, (self.num_classes,), param_dtype)
        wide = at_least_float32(compute_dtype)
        y = jnp.dot(x.astype(compute_dtype), kernel.astype(compute_dtype), precision=self.precision)
        return (y.astype(wide) + bias.astype(wide)[None]).astype(compute_dtype)


class ResNet(Network, kw_only=True):
    """A residual network; `mixedres.models.create` builds the named ones.

    It has the attributes of `Network`; results of the modules in `keep_float32` are float32 too.

    Attributes:
      stage_sizes: blocks per stage; stage i has `filters * 2**i` filters and, from the second on, stride 2.
      block: one of the four block classes above.
      version: '1', '1.5' or '2'; '2' has no norm in the stem and one before the last pool.
      filters: filters of the stem and of the first stage.
      small_images: a 3x3 stem of stride 1 without pooling (CIFAR) instead of 7x7 of stride 2 with it.
      momentum: factor of the old running averages of batch norms.
      epsilon: number that batch norms add to the variance.
      axis_name: mesh axis over which batch norms take statistics; None: per device.
      unbiased: whether running variances are the unbiased ones.
      padding: of the 3x3 convolutions of stride 2, 'pytorch' or 'tensorflow'; see `mixedres.models.operations.pads`.
      pool_padding: the same of the stem's max pool.
      projection: 'shape': a shortcut has one where its shape changes; 'stage': at the head of every stage.
      zero_init_last: start every block as the identity (Goyal et al., arXiv 1706.02677): v1 and v1.5 with a zero last
        batch-norm scale; v2, where that scale would never get a gradient, with a zero last kernel.
      kernel_init: initializer of the convolutions.
      head_init: initializer of the head's kernel.
      fused: in training, fuse batch norms with the ops after them; see `mixedres.models.layers.Norms`.
      use_onednn: on CPUs, compute bfloat16 convolutions in the forms of `mixedres.models.onednn`, which are slow
        without its compiler options.
      product_dtype: dtype to which a graph rewrite changes the convolutions; None: no rewrite changes it.
      folded: the variables are those of `mixedres.models.for_inference`; the network cannot be trained.
    """

    stage_sizes: Sequence[int]
    block: ModuleFn
    version: str
    filters: int
    small_images: bool
    momentum: float = 0.9
    epsilon: float = 1e-5
    axis_name: str | None = None
    unbiased: bool = True
    padding: str = "pytorch"
    pool_padding: str = "pytorch"
    projection: str = "shape"
    zero_init_last: bool = True
    kernel_init: Callable[..., Any] = nn.initializers.he_normal()
    head_init: Callable[..., Any] = nn.initializers.normal(0.01)
    fused: bool = False
    use_onednn: bool = False
    product_dtype: DType | None = None
    folded: bool = False

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Maps images (b, h, w, 3) of any float dtype to logits (b, num_classes) in the output dtype of the policy."""
        conv, norms = self._conv, Norms(self, train)
        compute_dtype, preactivated = self.policy.compute_dtype, self.version == "2"

        x = conv(self.filters, 3 if self.small_images else 7, 1 if self.small_images else 2, name="stem_conv")(images)
        self.sow("intermediates", "initial_conv", x)
        if preactivated:
            x = x if self.small_images else max_pool(x, self.pool_padding, use_onednn=self.use_onednn)
        else:
            x = norms.relu("stem_norm", x) if self.small_images else norms.relu_pool("stem_norm", x)
        if not self.small_images:
            self.sow("intermediates", "initial_max_pool", x)

        for stage, blocks in enumerate(self.stage_sizes, start=1):
            for index in range(blocks):
                x = self.block(
                    filters=self.filters * 2 ** (stage - 1),
                    stride=2 if stage > 1 and index == 0 else 1,
                    project=self.projection == "stage" and index == 0,
                    conv=partial(conv, padding=self.padding),  # the stem's is symmetric everywhere
                    norms=norms,
                    zero_init_last=self.zero_init_last,
                    policy=self.policy,
                    keep_float32=self.keep_float32,
                    name=f"block_layer{stage}_{index + 1}",
                )(x)
            self.sow("intermediates", f"block_layer{stage}", x)

        if preactivated:
            x = norms.relu("final_norm", x, after_conv=False)
        if not train:
            # Without the barrier jaxlib 0.11 and 0.12 fuse the last stage and the mean on CPUs with wrong results
            # (YNNPACK; NaN for ResNet-18 in bfloat16 from 160 pixels on).
            x = jax.lax.optimization_barrier(x)
        # The mean over 49 and more values is computed in float32.
        x = x.astype(at_least_float32(compute_dtype)).mean((1, 2)).astype(compute_dtype)
        self.sow("intermediates", "final_reduce_mean", x)
        x = Head(self.num_classes, self.policy, self.head_init, self.precision, self.keep_float32, name="head")(x)
        self.sow("intermediates", "final_dense", x)
        return x.astype(self.policy.output_dtype)

    @nn.nowrap
    def _conv(
        self, filters: int, size: int, stride: int = 1, *, padding: str = "pytorch", zeros: bool = False, name: str
    ) -> nn.Module:
        return Conv(
            filters,
            size,
            stride,
            padding=padding,
            policy=self.policy,
            kernel_init=nn.initializers.zeros if zeros else self.kernel_init,
            precision=self.precision,
            keep_float32=self.keep_float32,
            use_onednn=self.use_onednn,
            product_dtype=self.product_dtype,
            name=name,
        )
