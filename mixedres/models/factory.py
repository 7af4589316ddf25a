"""Networks by name: ResNets, and other networks that a program adds."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp

from mixedres._internal.jax_compat import sound_options
from mixedres._internal.tree import at_least_float32
from mixedres._internal.types import DType
from mixedres.models import onednn, resnet
from mixedres.models.names import OPTIONS, check_options, resnet_shape
from mixedres.models.resnet import Network, ResNet

Initializer: TypeAlias = Callable[..., jax.Array]
# Initializers of the convolutions, by the name in ``config.model.kernel_init``.
INITIALIZERS: dict[str, Initializer] = {
    # TensorFlow's v1.5, and most ResNets since.
    "he_normal": nn.initializers.he_normal(),
    # Torchvision's ResNets, and the backward case of the original paper.
    "he_normal_fan_out": nn.initializers.variance_scaling(2.0, "fan_out", "normal"),
    # Variance 1/fan_in: TensorFlow's v1 and v2 (variance_scaling_initializer()).
    "lecun_normal": nn.initializers.lecun_normal(),
    # The head of TensorFlow's official ResNet.
    "normal_0.01": nn.initializers.normal(0.01),
    "glorot_uniform": nn.initializers.glorot_uniform(),
}


def create(
    name: str,
    *,
    num_classes: int,
    policy: jmp.Policy,
    version: str | None = None,
    kernel_init: str | Initializer = "he_normal",
    head_init: str | Initializer = "normal_0.01",
    **options: Any,
) -> ResNet:
    """Returns a ResNet.

        model = create("resnet50", num_classes=1000, policy=precision.get("fp16").policy, epsilon=1e-3)

    Args:
      name: 'resnet14', '18', '26', '34', '50', '101', '152', '200', or 'cifar_resnet' and a size 6n+2 (20, 32, 44 ...).
      num_classes: outputs of the head, >= 1.
      policy: dtypes of parameters, arithmetic and logits.
      version: '1', '1.5' or '2' ('1' or '2' for cifar_resnet); None: '1.5', for cifar_resnet '1'.
      kernel_init: a name in `INITIALIZERS` or a jax initializer, for the convolutions.
      head_init: a name in `INITIALIZERS` or a jax initializer, for the head.
      **options: other attributes of `ResNet`.

    Raises:
      ValueError: for an invalid name, size, version, number, initializer or expression; the message names valid ones.
      TypeError: for an option that `ResNet` does not have.
    """
    bottleneck, stage_sizes, version, small_images = resnet_shape(name, version)
    blocks: dict[tuple[bool, bool], resnet.ModuleFn] = {
        (False, False): resnet.BasicBlock,
        (True, False): partial(resnet.BottleneckBlock, stride_first=version == "1"),
        (False, True): resnet.PreactBasicBlock,
        (True, True): resnet.PreactBottleneckBlock,
    }
    model = ResNet(
        stage_sizes=stage_sizes,
        block=blocks[bottleneck, version == "2"],
        version=version,
        filters=16 if small_images else 64,
        small_images=small_images,
        num_classes=num_classes,
        policy=policy,
        kernel_init=_initializer(kernel_init),
        head_init=_initializer(head_init),
        **options,
    )
    _check(model)
    return model


def for_platform(model: Network, platform: str, compute_dtype: DType, pixels: int) -> Network:
    """Returns the network as this machine computes it fastest: on CPUs with oneDNN or without.

    Compile its programs with `compiler_options`.

    Args:
      platform: platform of the device, such as 'cpu' or 'gpu'.
      compute_dtype: dtype of the convolutions, which a graph rewrite may change.
      pixels: height x width of all images to train with, in every epoch, or to predict.
    """
    if not isinstance(model, ResNet):
        return model
    # The network does not see the convolutions that a graph rewrite makes, so it cannot compute them in float32.
    is_rewritten = jnp.dtype(model.policy.compute_dtype) != jnp.dtype(compute_dtype)
    is_fast = not is_rewritten or onednn.multiplies(compute_dtype) or onednn.widens(compute_dtype)
    use_onednn = platform == "cpu" and is_fast and onednn.is_faster(compute_dtype, pixels)
    return model.clone(use_onednn=use_onednn, product_dtype=compute_dtype if is_rewritten else None)


def compiler_options(model: Network, platform: str) -> dict[str, Any]:
    """Returns the options of `jax.jit` for the programs of a network; `platform` is the platform of their device."""
    if platform != "cpu":
        return {}
    if not isinstance(model, ResNet):
        return sound_options(platform)
    if not model.use_onednn:
        return {}
    if onednn.multiplies(model.policy.compute_dtype) and onednn.multiplies(jnp.bfloat16):
        return onednn.COMPILER_OPTIONS
    # XLA would leave out the rounding of half-precision values that are computed with in float32. A float32 network has
    # such values where a graph rewrite makes them.
    return onednn.COMPILER_OPTIONS | {"xla_allow_excess_precision": False}


def _check(model: ResNet) -> None:
    """Raises ValueError for an attribute out of its range."""
    if model.num_classes < 1:
        raise ValueError(f"num_classes must be >= 1, got {model.num_classes}")
    if not 0 <= model.momentum < 1:
        raise ValueError(f"batch-norm momentum must be in [0, 1), got {model.momentum}")
    if not model.epsilon > 0:
        raise ValueError(f"batch-norm epsilon must be > 0, got {model.epsilon}")
    try:
        re.compile(model.keep_float32)
    except re.error as error:
        raise ValueError(f"keep_float32={model.keep_float32!r} is not a regular expression: {error}") from None
    check_options({name: getattr(model, name) for name in OPTIONS})
    wide, norms = at_least_float32(model.policy.compute_dtype), model.norm_policy
    if model.fused and norms is not None and norms.compute_dtype != wide:
        raise ValueError(f"fused norms compute in {wide}, and norm_policy in {jnp.dtype(norms.compute_dtype)}")


def _initializer(init: str | Initializer) -> Initializer:
    if not isinstance(init, str):
        return init
    if init not in INITIALIZERS:
        raise ValueError(f"initializer {init!r} is unknown; use one of {', '.join(INITIALIZERS)}")
    return INITIALIZERS[init]
