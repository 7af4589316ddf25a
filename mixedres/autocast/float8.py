"""`Float8`: which products of a program that is colored for bfloat16 are computed in float8. Experimental."""

import dataclasses
import math
import re
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from mixedres._internal import jax_compat
from mixedres.autocast.graph import Graph, Node, Value, reach
from mixedres.autocast.keep_float32 import Keep
from mixedres.autocast.rules import ALLOW, Lists

# Formats of values and weights, and of gradients, which need range rather than digits (Micikevicius et al., "FP8
# Formats for Deep Learning", 2022).
VALUES, GRADIENTS = "float8_e4m3fn", "float8_e5m2"
# Which a program in bfloat16 becomes.
WIDER = np.dtype(jnp.bfloat16)
# The least compute capability of NVIDIA's GPUs that XLA makes float8 products for.
CAPABILITY = (8, 9)
# What the path of an operation in a backward pass has more than that of the operation of which it is the gradient.
_PASSES = re.compile(r"transpose\(|jvp\(|\)|\b(remat2|checkpoint|rematted_computation)\b|/")
PRODUCTS = ("dot_general", "conv_general_dilated")
Part = Literal["values", "gradients", "derivative"]
# What takes logits: an error in one of 4 % of its size is one of the same size in the logarithm of a probability.
_OF_LOGITS = ("exp", "exp2", "log", "log1p", "custom_jvp_call")


@dataclasses.dataclass(frozen=True)
class Float8:
    """Products with float8 operands, for `autocast(fn, Float8())`; "fp8" is the same. Experimental.

    Everything else is that of bfloat16. Values and weights are float8_e4m3fn, gradients float8_e5m2, each scaled as a
    whole by a power of two that follows from its largest magnitude at that moment. Sums are float32, results bfloat16.

    Attributes:
      keep_bfloat16: regular expression of the paths whose products stay in bfloat16, such as '^/head$'; spelled as
        `keep_float32`.
      min_size: products with less stay in bfloat16, whose conversion costs more than it saves: of an m x k by a k x n
        matrix, 1 / (1/m + 1/k + 1/n), at most a third of the smallest of the three. See docs/float8.md for the number;
        0 for all.
      convolutions: whether forward convolutions are in float8, too; their gradients stay bfloat16. XLA compiles them
        for cuDNN, but none has been run on a device.

    Raises:
      ValueError: for an invalid expression or size.
      NotImplementedError: where JAX lacks the formats.
    """

    keep_bfloat16: str = ""
    min_size: float = 350.0
    convolutions: bool = False

    def __post_init__(self) -> None:
        _ = self.keep
        if not isinstance(self.min_size, int | float) or not 0 <= self.min_size < math.inf:
            raise ValueError(f"min_size must be a number >= 0, such as 350 (0: every product), got {self.min_size!r}")
        if missing := [name for name in (VALUES, GRADIENTS) if not hasattr(jnp, name)]:
            raise NotImplementedError(
                f"this version of JAX lacks jnp.{missing[0]}; upgrade jax and jaxlib, or use bf16"
            )

    @property
    def keep(self) -> Keep:
        """The paths that stay in bfloat16."""
        return Keep(self.keep_bfloat16, "keep_bfloat16")

    def check(self, graph: Graph) -> None:
        """Raises ValueError if `keep_bfloat16` is not empty and matches no product of a whole program."""
        products = [node for node in graph.all_nodes() if node.category == "allow"]
        if self.keep_bfloat16 and not any(self.keep.reason(node.scope) for node in products):
            self.keep.fail("product", products)


def why_emulated(graph: Graph) -> str:
    """What is to be said where the device has no float8 units, and the graph has products for them; else ''."""
    if not any(node.float8 for node in graph.nodes):
        return ""
    device = jax.devices()[0]
    capability = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))  # AMD's are 'gfx942'
    if capability and tuple(map(int, capability.groups())) >= CAPABILITY:
        return ""
    return (
        f"float8 is emulated on this device ({device.device_kind}), slowly: good for its numbers only. XLA multiplies "
        f"in float8 on NVIDIA GPUs of compute capability {'.'.join(map(str, CAPABILITY))} or more, such as H100"
    )


def check_lists(lists: Lists) -> None:
    """Raises ValueError where something else than a product is on the allow list."""
    if others := sorted(lists.allow - ALLOW):
        raise ValueError(
            f"lists allow {others[0]!r}, and float8 is for products ({', '.join(sorted(ALLOW))}); put it on infer"
        )


def color_float8(graph: Graph, float8: Float8, part: Part = "values", last: int = 0) -> None:
    """Sets `float8` and `reason` of the products of a colored graph.

    Args:
      graph: whose half dtype is bfloat16.
      float8: the settings.
      part: 'values': of a program; 'gradients': of a backward rule, whose last arguments are gradients; 'derivative':
        of a rule of custom_jvp, whose products are transposed later and would be of gradients then.
      last: how many of the last arguments are gradients in a backward rule.
    """
    keep = float8.keep
    after = _depending_on(graph.args[len(graph.args) - last :] if part == "gradients" else [])
    inner = _before_products(graph)
    made: dict[tuple[str, str], bool] = {}  # whether a product of a line and path is in float8
    for node in graph.nodes:
        if not (node.half and node.category == "allow"):
            continue
        are_gradients = [value in after if part == "gradients" else _made_backwards(value) for value in node.ins[:2]]
        place = jax_compat.source_line(node.eqn), _PASSES.sub("", node.scope.path)
        if part == "derivative":
            reason = "in a function with a derivative rule of its own (custom_jvp)"
        elif any(are_gradients) and not made.get(place, True):
            reason = "as the product whose gradient it is"
        else:
            reason = _why_not(node, float8, keep, are_gradients, node in inner)
        if not any(are_gradients):
            made[place] = made.get(place, False) or not reason
        if reason:
            node.reason = f"bfloat16: {reason}"
            continue
        formats = [GRADIENTS if gradient else VALUES for gradient in are_gradients]
        node.float8 = (formats[0], formats[1])
        node.reason = f"float8: {' x '.join(name.removeprefix('float8_').removesuffix('fn') for name in formats)}"


def _why_not(node: Node, float8: Float8, keep: Keep, are_gradients: list[bool], is_inner: bool) -> str:
    """Why a product stays in bfloat16, '' if it does not; `is_inner`: another one of the forward pass follows."""
    if node.primitive == "conv_general_dilated" and not float8.convolutions:
        return "a convolution; Float8(convolutions=True) takes those, too"
    if node.primitive not in PRODUCTS:
        return f"XLA computes no {node.primitive} in float8"
    if any(value.aval.dtype not in (jnp.float32, WIDER) for value in node.ins):
        return "an operand is neither float32 nor bfloat16"
    if node.wide == "solved" or (node.wide and not any(are_gradients) and not is_inner):
        return node.reason.removeprefix("on the allow list; ")
    if reason := keep.reason(node.scope):
        return reason
    if any(are_gradients) and node.primitive == "conv_general_dilated":
        return "a convolution with a gradient"
    if all(are_gradients):
        return "both operands are gradients, and no unit multiplies e5m2 by e5m2"
    if not any(are_gradients) and _goes_to_logits(node):
        return "its result goes to a softmax or a logarithm"
    *shape, size = size_of(node)
    if size < float8.min_size:
        return f"{' x '.join(map(str, shape))} is too small to gain (size {size:.0f}, below {float8.min_size:g})"
    return ""


def _before_products(graph: Graph) -> set[Node]:
    """The nodes of the forward pass from which a product follows there."""

    def is_forward(node: Node) -> bool:
        return "transpose(" not in node.scope.path

    products = [node for node in graph.nodes if node.half and node.category == "allow" and is_forward(node)]
    return reach(products, Node.producers, is_forward)


def size_of(node: Node) -> tuple[Any, Any, Any, float]:
    """(m, k, n, 1 / (1/m + 1/k + 1/n)) of a product of an m x k by a k x n matrix; a symbolic size counts as large."""
    left, right, out = (value.aval.shape for value in (*node.ins[:2], node.outs[0]))
    if node.primitive == "dot_general":
        (contracted, _), (batch, _) = node.eqn.params["dimension_numbers"]
        k = math.prod(left[axis] for axis in contracted)
        batches = math.prod(left[axis] for axis in batch)
        m = math.prod(left[axis] for axis in range(len(left)) if axis not in (*contracted, *batch))
        n = math.prod(out) // (batches * m) if batches * m else 0
    else:
        # As a product of a matrix of patches.
        outputs = right[node.eqn.params["dimension_numbers"].rhs_spec[0]]
        m, k, n = math.prod(out) // outputs, math.prod(right) // outputs, outputs
    numbers = [side for side in (m, k, n) if isinstance(side, int)]
    return m, k, n, 1 / max(sum(1 / max(side, 1) for side in numbers), 1e-9)


def _depending_on(values: list[Value]) -> set[Value]:
    """The values that depend on some values, with these."""
    nodes = {reader for value in values for reader in value.consumers}
    nodes |= reach(nodes, lambda node: (reader for value in node.outs for reader in value.consumers), lambda node: True)
    return {*values, *(value for node in nodes for value in node.outs)}


def _made_backwards(value: Value) -> bool:
    """Whether a value is a gradient of a program that differentiates itself, by the name that JAX gives to its maker.

    What a checkpoint computes again in the backward pass is not.
    """
    if value.producer is None:
        return False
    path = value.producer.scope.path
    return "transpose(" in path and "rematted_computation" not in path


def _goes_to_logits(node: Node) -> bool:
    """Whether a softmax, a logarithm or a custom function with one reads a product, through infer and clear ops."""
    reached = (node, *reach([node], Node.consumers, lambda n: n.category in ("infer", "clear")))
    readers = (reader for one in reached for reader in one.consumers())
    return any(reader.category == "deny" and reader.primitive in _OF_LOGITS and not reader.sums for reader in readers)
