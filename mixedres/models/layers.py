"""Layers of a ResNet: convolution, and batch normalization, alone or fused with the operations after it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp
from flax import traverse_util

from mixedres._internal.jaxprs.module_paths import match_module
from mixedres._internal.tree import at_least_float32
from mixedres._internal.types import DType, Function
from mixedres.models import fused
from mixedres.models.fused import NormConfig
from mixedres.models.operations import convolution, max_pool, relu


def policy_of(module: Any, *names: str) -> jmp.Policy:
    """Returns the policy of a flax module that is being called: float32 if `module.keep_float32` matches its path.

    With `names`, that of a layer inside: `policy_of(self, "head").compute_dtype` is for the layer `head` of this
    module. Paths are like /stem_conv, /block_layer1_1/conv1 and /head; an empty regular expression matches none.
    """
    return policy_at((*module.path, *names), module.policy, module.keep_float32)


def policy_at(path: Sequence[str], policy: jmp.Policy, keep_float32: str) -> jmp.Policy:
    """Returns `policy`, in float32 or wider if `keep_float32` matches `path` or a module around it."""
    if not keep_float32 or match_module(keep_float32, "/" + "/".join(path)) is None:
        return policy
    compute, output = (at_least_float32(d) for d in (policy.compute_dtype, policy.output_dtype))
    return jmp.Policy(policy.param_dtype, compute, output)


def module_paths(params: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the paths of all modules with these parameters, in the spelling that `keep_float32` is matched with."""
    leaves = traverse_util.flatten_dict(params)
    return tuple(dict.fromkeys("/" + "/".join(path[:end]) for path in leaves for end in range(1, len(path))))


class Conv(nn.Module):
    """A square convolution like `flax.linen.Conv`, padded so that stride 1 keeps the shape; dtypes by `policy_of`."""

    filters: int
    size: int
    stride: int
    policy: jmp.Policy
    kernel_init: Callable[..., Any]
    padding: str = "pytorch"
    precision: Any = None
    keep_float32: str = ""
    use_onednn: bool = False
    product_dtype: DType | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (b, h, w, c) of any float dtype to (b, h / stride, w / stride, filters) in the compute dtype."""
        policy, shape = policy_of(self), (self.size, self.size, x.shape[-1], self.filters)
        x = x.astype(policy.compute_dtype)
        kernel = self.param("kernel", self.kernel_init, shape, policy.param_dtype).astype(policy.compute_dtype)
        options = {name: getattr(self, name) for name in ("padding", "precision", "use_onednn", "product_dtype")}
        return convolution(x, kernel, self.stride, **options)


@dataclasses.dataclass(frozen=True)
class NormVariables:
    """Variables of a `BatchNorm`, each (features,), and the dtype of its result."""

    norm: Any
    scale: jax.Array
    bias: jax.Array
    mean: nn.Variable[jax.Array]
    var: nn.Variable[jax.Array]
    dtype: Any

    def update_running_stats(self, y: jax.Array, mean: jax.Array, var: jax.Array) -> None:
        """Updates the running averages by the statistics of a map `y`, of which `var` is the biased variance."""
        norm = self.norm
        if norm.unbiased:
            count = y.size // y.shape[-1] * (1 if norm.axis_name is None else jax.lax.axis_size(norm.axis_name))
            var = var * (count / max(count - 1, 1))
        for running, new in ((self.mean, mean), (self.var, var)):
            running.value = norm.momentum * running.value + (1.0 - norm.momentum) * jax.lax.stop_gradient(new)


class BatchNorm(nn.Module):
    """Batch normalization over all axes but the last.

    Statistics are float32 for every policy (float64 for arithmetic in float64): the variance of values around 300
    overflows float16, and a float16 sum over a batch loses most of its digits. Variance is E[x²] - E[x]², clipped at 0.

    Running averages follow ``running = momentum * running + (1 - momentum) * batch``, where the variance of n values is
    that of the batch times n / (n - 1) if `unbiased`, as in PyTorch and TensorFlow, else that of the batch, as in flax.
    """

    policy: jmp.Policy
    momentum: float = 0.9
    epsilon: float = 1e-5
    axis_name: str | None = None
    unbiased: bool = True
    scale_init: Callable[..., Any] = nn.initializers.ones
    keep_float32: str = ""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Normalizes `x` (batch, ..., features) by its own statistics in training, else by the running averages."""
        policy, own = policy_of(self), self._variables(x.shape[-1])
        compute_dtype = policy.compute_dtype
        stats_dtype = at_least_float32(compute_dtype)
        if train:
            mean, var = self._batch_statistics(x.astype(stats_dtype))
            if not self.is_initializing():
                own.update_running_stats(x, mean, var)
        else:
            mean, var = own.mean.value, own.var.value

        factor = jax.lax.rsqrt(var + self.epsilon) * own.scale.astype(stats_dtype)
        per_channel = (1,) * (x.ndim - 1) + (x.shape[-1],)
        mean, factor, bias = (v.astype(compute_dtype).reshape(per_channel) for v in (mean, factor, own.bias))
        return ((x.astype(compute_dtype) - mean) * factor + bias).astype(policy.output_dtype)

    def _batch_statistics(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        axes = tuple(range(x.ndim - 1))
        mean, mean_of_squares = x.mean(axes), jax.lax.square(x).mean(axes)
        if self.axis_name is not None and not self.is_initializing():
            mean, mean_of_squares = jax.lax.pmean((mean, mean_of_squares), self.axis_name)
        return mean, jnp.maximum(mean_of_squares - jax.lax.square(mean), 0.0)

    @nn.nowrap
    def _variables(self, features: int) -> NormVariables:
        policy = policy_of(self)
        stats_dtype = at_least_float32(policy.compute_dtype)
        return NormVariables(
            norm=self,
            scale=self.param("scale", self.scale_init, (features,), policy.param_dtype),
            bias=self.param("bias", nn.initializers.zeros, (features,), policy.param_dtype),
            mean=self.variable("batch_stats", "mean", jnp.zeros, (features,), stats_dtype),
            var=self.variable("batch_stats", "var", jnp.ones, (features,), stats_dtype),
            dtype=policy.output_dtype,
        )


class BatchNormParams(BatchNorm):
    """Variables of a `BatchNorm` at its path, for a fused function."""

    @nn.compact
    def __call__(self, features: int) -> NormVariables:  # type: ignore[override]
        """Returns the variables for a map of `features` channels."""
        return self._variables(features)


class Bias(nn.Module):
    """The rest of a batch norm that is folded into the convolution before it.

    The sum is in the dtype of the convolution, because XLA for GPUs fuses no float32 sum into a convolution.
    """

    policy: jmp.Policy

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns x + bias for `x` (batch, ..., features), in the output dtype."""
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:], self.policy.param_dtype)
        return x + bias.astype(self.policy.output_dtype).reshape((1,) * (x.ndim - 1) + bias.shape)


@dataclasses.dataclass(frozen=True)
class Norms:
    """Batch norms of a `ResNet`, for use inside the calling flax module.

    Fused norms run outside their module: in the name scope of the norm, or of the block if they also add the residual,
    and in the dtype of the block. They have the same variables and, up to rounding, the same values.
    """

    network: Any = dataclasses.field(repr=False)
    train: bool

    @property
    def fused(self) -> bool:
        """Returns whether norms are fused with the operations after them."""
        # Initialization needs no statistics and has no mesh axes to average them over.
        return self.network.fused and self.train and not self.network.is_initializing()

    def relu(self, name: str, y: jax.Array, *, after_conv: bool = True) -> jax.Array:
        """Returns relu(norm(y)); `after_conv`: whether `y` is the result of a convolution."""
        if not self.fused:
            return self._relu(self._plain(name, y, after_conv=after_conv))
        return self._fused_relu(fused.norm_relu, name, y)

    def relu_pool(self, name: str, y: jax.Array) -> jax.Array:
        """Returns max_pool(relu(norm(y)))."""
        if not self.fused:
            network = self.network
            return max_pool(self.relu(name, y), network.pool_padding, use_onednn=network.use_onednn)
        return self._fused_relu(fused.norm_relu_pool, name, y)

    def add_relu(self, name: str, y: jax.Array, x: jax.Array, dtype: DType, **options: Any) -> jax.Array:
        """Returns relu(norm(y) + x), sum and result in `dtype`; `options` are attributes of the norm."""
        if not self.fused:
            return self._relu(add(self._plain(name, y, **options), x, dtype))
        own = self._params(name, y, **options)
        out, statistics = fused.norm_add_relu(y, x, own.scale, own.bias, self._config(dtype))
        own.update_running_stats(y, *statistics)
        return out

    def pair_add_relu(
        self, name: str, y: jax.Array, name_z: str, z: jax.Array, dtype: DType, **options: Any
    ) -> jax.Array:
        """Returns relu(norm(y) + norm(z)), sum and result in `dtype`; `options` are attributes of the norm of `y`."""
        if not self.fused:
            return self._relu(add(self._plain(name, y, **options), self._plain(name_z, z), dtype))
        of_y, of_z = self._params(name, y, **options), self._params(name_z, z)
        args = y, of_y.scale, of_y.bias, z, of_z.scale, of_z.bias
        out, statistics_y, statistics_z = fused.norms_add_relu(*args, self._config(dtype))
        of_y.update_running_stats(y, *statistics_y)
        of_z.update_running_stats(z, *statistics_z)
        return out

    def _plain(self, name: str, y: jax.Array, *, after_conv: bool = True, **options: Any) -> jax.Array:
        if self.network.folded and after_conv:
            return Bias(self._options["policy"], name=name)(y)
        return BatchNorm(name=name, **self._options, **options)(y, self.train)

    def _relu(self, x: jax.Array) -> jax.Array:
        return relu(x, use_onednn=self.network.use_onednn)

    def _fused_relu(self, function: Function, name: str, y: jax.Array) -> jax.Array:
        own = self._params(name, y)
        with jax.named_scope(name):
            out, statistics = function(y, own.scale, own.bias, self._config(own.dtype))
        own.update_running_stats(y, *statistics)
        return out

    def _params(self, name: str, y: jax.Array, **options: Any) -> NormVariables:
        return BatchNormParams(name=name, **self._options, **options)(y.shape[-1])

    def _config(self, dtype: DType) -> NormConfig:
        of = self.network
        return NormConfig(of.epsilon, dtype, of.axis_name, of.pool_padding, of.use_onednn)

    @property
    def _options(self) -> dict[str, Any]:
        policy = self.network.policy
        narrow = jmp.Policy(policy.param_dtype, at_least_float32(policy.compute_dtype), policy.compute_dtype)
        names = ("momentum", "epsilon", "axis_name", "unbiased", "keep_float32")
        return {"policy": self.network.norm_policy or narrow} | {name: getattr(self.network, name) for name in names}


def add(y: jax.Array, x: jax.Array, dtype: DType) -> jax.Array:
    """Returns the sum of two branches in `dtype`; a branch may be float32 if its layer is kept in float32."""
    return x.astype(dtype) + y.astype(dtype)
