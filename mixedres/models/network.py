"""The base of all networks."""

from typing import Any

import flax.linen as nn
import jmp


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
