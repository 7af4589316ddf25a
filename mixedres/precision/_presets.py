"""Precision presets: named choices of dtypes, loss scale and implementation."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jmp
from jax.typing import DTypeLike

from mixedres._internal.names import IMPLEMENTATIONS, LEVELS, MATMUL_PRECISIONS, PRESETS, unknown_preset
from mixedres._internal.tree import at_least_float32
from mixedres._internal.types import Function
from mixedres.amp import Keep, Lists, ListsLike, autocast
from mixedres.precision._loss_scale import LossScale, make_loss_scale


@dataclasses.dataclass(frozen=True)
class Precision:
    """Precision of a model, its loss and its optimizer; `get` makes one.

    Attributes:
      name: name of the preset.
      policy: dtypes of parameters, computation and output of the network.
      norm_policy: dtypes of normalization layers; their statistics are always float32.
      loss_scale: 'none', 'dynamic' or a number > 0.
      implementation: 'casting': the layers cast their inputs and weights themselves; 'graph_rewrite': the network is
        built in float32, and `mixedres.amp.autocast` rewrites it.
      matmul_precision: precision of float32 products: 'highest' is float32, 'tensorfloat32' has a 10-bit mantissa,
        'default' is the platform's choice (TF32 on recent GPUs).
      lists: lists of primitives of the graph rewrite; see `mixedres.amp.autocast`.
      level: level of the graph rewrite, one of `mixedres.amp.LEVELS`.
      keep_float32: regular expression of the paths of layers that stay in float32, such as '^/head$'; '': none.
    """

    name: str
    policy: jmp.Policy
    norm_policy: jmp.Policy
    loss_scale: str | float
    implementation: str
    matmul_precision: str
    lists: Lists | None = None
    level: str = "default"
    keep_float32: str = ""

    @property
    def network_policies(self) -> tuple[jmp.Policy, jmp.Policy]:
        """Returns the policies of the layers and of their norms; float32 for the graph rewrite."""
        if self.implementation == "graph_rewrite":
            full = jmp.get_policy(_policy_text("float32"))
            return full, full
        return self.policy, self.norm_policy

    @property
    def network_options(self) -> dict[str, Any]:
        """Returns arguments of `mixedres.models.create`: 'policy', 'norm_policy', 'precision' and 'keep_float32'."""
        policy, norm_policy = self.network_policies
        return {
            "policy": policy,
            "norm_policy": norm_policy,
            "precision": self.matmul_precision,
            "keep_float32": self.keep_float32,
        }

    @property
    def why_not_fusable(self) -> str | None:
        """Returns the reason why `mixedres.models.fused` cannot compute norms in this precision; None if it can."""
        has_own_rules = (self.lists, self.level, self.keep_float32) != (None, "default", "")
        if self.implementation == "graph_rewrite" and has_own_rules:
            return "lists, a level or keep_float32 of a graph rewrite: they do not apply inside fused norms"
        computes, fused = self.norm_policy.compute_dtype, at_least_float32(self.policy.compute_dtype)
        if computes != fused:
            return f"norm_policy '{self.norm_policy}': fused norms compute in {fused}; write compute={fused}"
        return None

    @property
    def wider(self) -> str | None:
        """Returns the name of the bfloat16 preset, which has a wider range, for a float16 preset; None for others."""
        range_of = jnp.finfo(self.policy.compute_dtype).max  # type: ignore[no-untyped-call]
        half = range_of < jnp.finfo(jnp.bfloat16).max  # type: ignore[no-untyped-call]
        return preset_of(jnp.bfloat16, self.implementation) if half else None

    def rewrite(self, fn: Function) -> Callable[..., Any]:
        """Returns `fn` itself if the layers cast, else its graph rewrite."""
        if self.implementation == "casting":
            return fn
        return autocast(fn, self.policy.compute_dtype, self.lists, level=self.level, keep_float32=self.keep_float32)

    def make_loss_scale(self, **dynamic: Any) -> LossScale:
        """Returns a new loss scale of kind `loss_scale`; `dynamic` are options of `DynamicLossScale`, else ignored."""
        return make_loss_scale(self.loss_scale, **dynamic)


def _policy_text(compute_dtype: str) -> str:
    return f"params=float32,compute={compute_dtype},output=float32"


def preset_of(compute_dtype: DTypeLike, implementation: str) -> str:
    """Returns the name of the first preset with a compute dtype and an implementation.

    >>> preset_of("bfloat16", "graph_rewrite")
    'bf16_rewrite'

    Raises:
      ValueError: if there is none.
      TypeError: for a `compute_dtype` that `jnp.dtype` does not take, such as 'fp16'.
    """
    dtype = jnp.dtype(compute_dtype).name
    for name, preset in PRESETS.items():
        if (preset.compute_dtype, preset.implementation) == (dtype, implementation):
            return name
    raise ValueError(f"no preset computes in {dtype} by {implementation}")


def get(
    name: str,
    *,
    policy: str | jmp.Policy | None = None,
    norm_policy: str | jmp.Policy | None = None,
    loss_scale: str | float | None = None,
    implementation: str | None = None,
    matmul_precision: str | None = None,
    lists: ListsLike = None,
    level: str = "default",
    keep_float32: str = "",
) -> Precision:
    """Returns the preset `name`, with any part replaced; other arguments are fields of `Precision`.

        chosen = precision.get("fp16", keep_float32="^/head$")

    Args:
      name: a key of `PRESETS`.
      policy: a `jmp.Policy` or its text, see `parse_policy`. The loss scale stays the preset's. A graph rewrite uses
        the compute dtype alone.
      norm_policy: the policy of normalization; None computes in float32 and returns the compute dtype.

    Raises:
      ValueError: for an invalid name, text or number, and for an option that the preset would ignore, such as `lists`
        in one that casts; the message says what is valid.
      TypeError: for `lists` that are neither a `Lists` nor a mapping.
    """
    if name not in PRESETS:
        raise ValueError(unknown_preset(name))
    parts = {"loss_scale": loss_scale, "implementation": implementation, "matmul_precision": matmul_precision}
    given: dict[str, Any] = {part: value for part, value in parts.items() if value is not None}
    preset = PRESETS[name]._replace(**given)
    network = parse_policy(_policy_text(preset.compute_dtype) if policy is None else policy)
    norms = _default_norm_policy(network) if norm_policy is None else parse_policy(norm_policy)
    # Raises for an invalid loss scale. Only traced: devices must not start before the processes of a run are connected.
    jax.eval_shape(lambda: make_loss_scale(preset.loss_scale))
    chosen = Precision(
        name=name,
        policy=network,
        norm_policy=norms,
        loss_scale=preset.loss_scale,
        implementation=_one_of("implementation", preset.implementation, IMPLEMENTATIONS),
        matmul_precision=_one_of("matmul precision", preset.matmul_precision, MATMUL_PRECISIONS),
        lists=None if lists is None else Lists.parse(lists, network.compute_dtype),
        level=_one_of("level", level, LEVELS),
        keep_float32=Keep(keep_float32).pattern,
    )
    _check_rewrite(chosen, norms_given=norm_policy is not None)
    return chosen


def _check_rewrite(precision: Precision, *, norms_given: bool) -> None:
    """Raises ValueError for options that the chosen implementation would ignore."""
    name = precision.name
    if precision.implementation == "casting":
        if precision.lists is not None or precision.level != "default":
            raise ValueError(f"lists and level are for the graph rewrite, but precision {name!r} casts in the layers")
        return
    compute = jnp.dtype(precision.policy.compute_dtype).name
    if compute not in ("float16", "bfloat16"):
        raise ValueError(
            f"implementation 'graph_rewrite' needs a half compute dtype, and precision {name!r} computes in {compute}; "
            "use fp16_rewrite or bf16_rewrite"
        )
    if precision.matmul_precision == "highest":
        raise ValueError(
            "matmul precision 'highest' asks for float32 products, which 'graph_rewrite' does not cast; use 'default'"
        )
    if norms_given:
        raise ValueError("norm_policy has no effect under 'graph_rewrite': normalization is float32 inside")


def parse_policy(policy: str | jmp.Policy) -> jmp.Policy:
    """Returns the `jmp.Policy` of a text in jmp's grammar; a policy is checked and returned unchanged.

    Args:
      policy: a policy; or 'params=float32,compute=float16,output=float32', the same with p=, c= and o=, or one dtype
        for all three. Without output=, results have the compute dtype; without another part, that part is float32.
        'bf16' is the dtype, for parameters too, and not the preset.

    Raises:
      ValueError: for anything else, such as 'fp16', and for float64 without x64 mode.
    """
    if not isinstance(policy, jmp.Policy):
        try:
            policy = jmp.get_policy(policy)
        except (ValueError, TypeError):
            raise ValueError(
                f"policy {policy!r} does not parse; write 'params=float32,compute=float16,output=float32' (or "
                "p=, c=, o=) with the dtypes float16, bfloat16, float32, float64, half, full, or one dtype for all"
            ) from None
    dtypes = (policy.param_dtype, policy.compute_dtype, policy.output_dtype)
    if jnp.float64 in dtypes and jax.dtypes.canonicalize_dtype(jnp.float64) != jnp.float64:
        raise ValueError(f"policy {policy!r} has float64, which jax converts to float32; set JAX_ENABLE_X64=1")
    return policy


def _default_norm_policy(policy: jmp.Policy) -> jmp.Policy:
    return jmp.Policy(
        param_dtype=policy.param_dtype,
        compute_dtype=jnp.float64 if policy.compute_dtype == jnp.float64 else jnp.float32,
        output_dtype=policy.compute_dtype,
    )


def _one_of(what: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"{what} {value!r} is unknown; use one of {', '.join(allowed)}")
    return value
