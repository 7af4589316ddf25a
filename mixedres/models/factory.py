"""Models by name."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import flax.linen as nn
import jax.numpy as jnp
import jmp

from mixedres._internal.types import PrecisionLike
from mixedres.models import resnet
from mixedres.models.operations import PADDINGS
from mixedres.models.resnet import ResNet

# size: (whether it has bottlenecks, blocks per stage); arXiv 1512.03385, table 1, and 1603.05027 for 200.
_IMAGENET_SIZES = {
    18: (False, (2, 2, 2, 2)),
    34: (False, (3, 4, 6, 3)),
    50: (True, (3, 4, 6, 3)),
    101: (True, (3, 4, 23, 3)),
    152: (True, (3, 8, 36, 3)),
    200: (True, (3, 24, 36, 3)),
}
_IMAGENET_VERSIONS: tuple[str, ...] = ("1", "1.5", "2")
_CIFAR_VERSIONS: tuple[str, ...] = ("1", "2")
# Options of a network that its weights do not show, with their values; the first is the default.
OPTIONS = {"padding": PADDINGS, "pool_padding": PADDINGS, "projection": ("shape", "stage")}
NAMES = (*(f"resnet{size}" for size in _IMAGENET_SIZES), "cifar_resnet{6n+2}")


class Network(Protocol):
    """A network that can be trained: a Flax module with these fields, such as `ResNet`.

    ``apply(variables, images, train=...)`` takes images (b, h, w, c) in float32 and returns logits (b, num_classes) in
    the output dtype of the policy. The variables are 'params' and, if the network has running statistics,
    'batch_stats', all float32.

    Attributes:
      num_classes: outputs of the network.
      policy: dtypes of parameters, arithmetic and logits; float32 under a graph rewrite.
      norm_policy: dtypes of normalization.
      precision: precision of every product; see `jax.lax.dot_general`.
      keep_float32: regular expression of the paths of modules that compute in float32.
    """

    num_classes: int
    policy: jmp.Policy
    norm_policy: jmp.Policy | None
    precision: Any
    keep_float32: str

    @property
    def init(self) -> Callable[..., Any]:
        """Returns the method that makes variables: (key, images, train) -> {'params', 'batch_stats'}."""

    @property
    def apply(self) -> Callable[..., Any]:
        """Returns the method that computes logits: (variables, images, train)."""

    @property
    def clone(self) -> Callable[..., Any]:
        """Returns the method that copies the module with other fields."""


# Networks that are no ResNets, by the name in config.model.name: functions from the fields of `Network`, as keyword
# arguments, to a network. The keys of a config that are about ResNets (model.*, batch_norm.*) do not apply to them.
NETWORKS: dict[str, Callable[..., Network]] = {}

INITIALIZERS: dict[str, Callable[..., Any]] = {
    # The v1.5 reference and most ResNets since.
    "he_normal": nn.initializers.he_normal(),
    # Torchvision's ResNets, and the backward case of the original paper.
    "he_normal_fan_out": nn.initializers.variance_scaling(2.0, "fan_out", "normal"),
    # Variance 1/fan_in: the reference's v1 and v2 (TensorFlow's variance_scaling_initializer()).
    "lecun_normal": nn.initializers.lecun_normal(),
    # The reference's head.
    "normal_0.01": nn.initializers.normal(0.01),
    "glorot_uniform": nn.initializers.glorot_uniform(),
}


def create(
    name: str,
    *,
    num_classes: int,
    policy: jmp.Policy,
    version: str | None = None,
    norm_policy: jmp.Policy | None = None,
    momentum: float = 0.9,
    epsilon: float = 1e-5,
    unbiased: bool = True,
    padding: str = "pytorch",
    pool_padding: str = "pytorch",
    projection: str = "shape",
    zero_init_last: bool = True,
    kernel_init: str | Callable[..., Any] = "he_normal",
    head_init: str | Callable[..., Any] = "normal_0.01",
    axis_name: str | None = None,
    precision: PrecisionLike = None,
    keep_float32: str = "",
    fused: bool = False,
) -> ResNet:
    """Builds a ResNet.

    Args:
      name: 'resnet18', '34', '50', '101', '152' or '200', or 'cifar_resnet' and a size 6n+2 (20, 32, 44, 56, 110 ...).
      num_classes: outputs of the head, >= 1.
      policy: dtypes of parameters, arithmetic and logits.
      version: '1', '1.5' or '2' ('1' or '2' for cifar_resnet); default '1.5', for cifar_resnet '1'.
      norm_policy: dtypes of batch normalization; None for float32 arithmetic and a result in the compute dtype.
      momentum: momentum of the running averages of batch normalization, in [0, 1).
      epsilon: epsilon of batch normalization.
      unbiased: running variances are estimates without bias, as in PyTorch and TensorFlow.
      padding, pool_padding, projection: see `ResNet`; the defaults are PyTorch's, `OPTIONS` has all values.
      zero_init_last: start every block as the identity, by zeros in its last layer.
      kernel_init, head_init: a name in `INITIALIZERS` or a jax initializer, for convolutions and for the head.
      axis_name: mesh axis over which batch statistics are averaged; None for statistics per device.
      precision: precision of every product; see `jax.lax.conv_general_dilated`.
      keep_float32: regular expression of the module paths that stay in float32, such as '^/head$'; see `ResNet`.
      fused: in training, fuse batch norms with the ops after them, which saves memory traffic; norms compute in
        float32, or in the policy's compute dtype if it is wider.

    Raises:
      ValueError: for an invalid name, size, version, number, initializer or expression; the message names valid ones.
    """
    bottleneck, stage_sizes, version, small_images = _network(name, version)
    _check(num_classes, momentum, epsilon, keep_float32)
    check_options({"padding": padding, "pool_padding": pool_padding, "projection": projection})
    wide = jnp.promote_types(policy.compute_dtype, jnp.float32)
    if fused and norm_policy is not None and norm_policy.compute_dtype != wide:
        raise ValueError(f"fused norms compute in {wide}, and norm_policy in {jnp.dtype(norm_policy.compute_dtype)}")
    blocks: dict[tuple[bool, bool], resnet.ModuleFn] = {
        (False, False): resnet.BasicBlock,
        (True, False): partial(resnet.BottleneckBlock, stride_first=version == "1"),
        (False, True): resnet.PreactBasicBlock,
        (True, True): resnet.PreactBottleneckBlock,
    }
    return ResNet(
        stage_sizes=stage_sizes,
        block=blocks[bottleneck, version == "2"],
        version=version,
        filters=16 if small_images else 64,
        small_images=small_images,
        num_classes=num_classes,
        policy=policy,
        norm_policy=norm_policy,
        momentum=momentum,
        epsilon=epsilon,
        axis_name=axis_name,
        unbiased=unbiased,
        padding=padding,
        pool_padding=pool_padding,
        projection=projection,
        zero_init_last=zero_init_last,
        kernel_init=_initializer(kernel_init),
        head_init=_initializer(head_init),
        precision=precision,
        keep_float32=keep_float32,
        fused=fused,
    )


def _check(num_classes: int, momentum: float, epsilon: float, keep_float32: str) -> None:
    if num_classes < 1:
        raise ValueError(f"num_classes must be >= 1, got {num_classes}")
    if not 0 <= momentum < 1:
        raise ValueError(f"batch-norm momentum must be in [0, 1), got {momentum}")
    if not epsilon > 0:
        raise ValueError(f"batch-norm epsilon must be > 0, got {epsilon}")
    try:
        re.compile(keep_float32)
    except re.error as error:
        raise ValueError(f"keep_float32={keep_float32!r} is not a regular expression: {error}") from None


def check_options(options: Mapping[str, str]) -> None:
    """Raises ValueError unless all `options` are in `OPTIONS`, with one of their values."""
    for name, value in options.items():
        if name not in OPTIONS:
            raise ValueError(f"option {name!r} is unknown; use {', '.join(OPTIONS)}")
        if value not in OPTIONS[name]:
            raise ValueError(f"{name} {value!r} is unknown; use {' or '.join(OPTIONS[name])}")


def default_version(name: str) -> str:
    """The version of a network that is named without one."""
    return "1" if name.startswith("cifar_") else "1.5"


def name_of(bottleneck: bool, stage_sizes: tuple[int, ...]) -> str | None:
    """The name of the network with these blocks, or None."""
    for size, network in _IMAGENET_SIZES.items():
        if network == (bottleneck, stage_sizes):
            return f"resnet{size}"
    if not bottleneck and len(stage_sizes) == 3 and len(set(stage_sizes)) == 1:
        return f"cifar_resnet{6 * stage_sizes[0] + 2}"
    return None


def _network(name: str, version: str | None) -> tuple[bool, tuple[int, ...], str, bool]:
    """(whether it has bottlenecks, blocks per stage, version, whether it has the stem for small images) of a name."""
    match = re.fullmatch(r"(cifar_)?resnet([0-9]{1,4})", name)
    if match is None:
        raise ValueError(f"model {name!r} is unknown; use one of {', '.join((*NAMES, *NETWORKS))}")
    size, small_images = int(match[2]), match[1] is not None
    stage_sizes: tuple[int, ...]
    if small_images:
        blocks, rest = divmod(size - 2, 6)
        if rest or blocks < 1:
            below = max(1, blocks) * 6 + 2
            raise ValueError(f"model {name!r}: the size must be 6n+2; the nearest are {below} and {below + 6}")
        bottleneck, stage_sizes = False, (blocks,) * 3
    elif size in _IMAGENET_SIZES:
        bottleneck, stage_sizes = _IMAGENET_SIZES[size]
    else:
        sizes = ", ".join(str(size) for size in _IMAGENET_SIZES)
        raise ValueError(f"model {name!r}: the size must be one of {sizes}")
    versions = _CIFAR_VERSIONS if small_images else _IMAGENET_VERSIONS
    version = str(version or default_version(name))
    if version not in versions:
        raise ValueError(f"model {name!r} has the versions {', '.join(versions)}, not {version!r}")
    return bottleneck, stage_sizes, version, small_images


def _initializer(init: str | Callable[..., Any]) -> Callable[..., Any]:
    if callable(init):
        return init
    if init not in INITIALIZERS:
        raise ValueError(f"initializer {init!r} is unknown; use one of {', '.join(INITIALIZERS)}")
    return INITIALIZERS[init]
