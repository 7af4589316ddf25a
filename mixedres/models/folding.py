"""Batch norms folded into the convolutions before them, for a network that is not trained any more.

With the running averages a batch norm is y * factor + shift for each channel, where shift = bias - mean * factor and
factor = scale / sqrt(var + epsilon): factor * conv(x, kernel) + shift = conv(x, factor * kernel) + shift. On a GPU one
function of cuDNN then computes convolution, bias, shortcut and ReLU.
"""

from typing import Any

from flax import traverse_util

from mixedres._internal.types import Variables
from mixedres.models.layers import policy_at
from mixedres.models.resnet import Network, ResNet

# {norm: the convolution before it}. In version 2 the first norm of a block, and the last norm of the network, are
# applied to a sum.
_PAIRS = {"stem_norm": "stem_conv", "norm1": "conv1", "norm2": "conv2", "norm3": "conv3", "norm_proj": "conv_proj"}
_PAIRS_OF_VERSION_2 = {"norm2": "conv1", "norm3": "conv2"}


def for_inference(model: Network, variables: Variables, *, fold: bool) -> tuple[Network, Variables]:
    """Returns the network with its weights as inference needs them; may be called inside `jax.jit`.

    The kernels of a ResNet are cast to the dtype in which it computes.

    Args:
      variables: {'params', 'batch_stats'}, numpy or jax arrays, float32.
      fold: fold batch norms, if the network allows it: a ResNet whose layers all return the same dtype.
    """
    if not isinstance(model, ResNet):
        return model, variables
    norms = model.norm_policy or model.policy
    if fold and not model.keep_float32 and norms.output_dtype == model.policy.compute_dtype:
        variables = _folded(model, variables)
        model = model.clone(folded=True)
    params = traverse_util.flatten_dict(variables["params"])
    for path, kernel in params.items():
        if path[-1] == "kernel":
            params[path] = kernel.astype(policy_at(path[:-1], model.policy, model.keep_float32).compute_dtype)
    return model, variables | {"params": traverse_util.unflatten_dict(params)}


def _folded(model: ResNet, variables: Variables) -> Variables:
    """Returns the variables of the folded network."""
    params: dict[Any, Any] = traverse_util.flatten_dict(variables["params"])
    statistics: dict[Any, Any] = traverse_util.flatten_dict(variables["batch_stats"])
    pairs = _PAIRS_OF_VERSION_2 if model.version == "2" else _PAIRS
    for *block, norm in [path[:-1] for path in statistics if path[-1] == "mean"]:
        if norm not in pairs:
            continue
        kernel, of_norm = (*block, pairs[norm], "kernel"), (*block, norm)
        mean, var = (statistics.pop((*of_norm, name)) for name in ("mean", "var"))
        factor = params.pop((*of_norm, "scale")) * (var + model.epsilon) ** -0.5
        params[kernel] = params[kernel] * factor.reshape(1, 1, 1, -1)
        params[*of_norm, "bias"] = params[*of_norm, "bias"] - mean * factor
    return {
        "params": traverse_util.unflatten_dict(params),
        "batch_stats": traverse_util.unflatten_dict(statistics),
    }
