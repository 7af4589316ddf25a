"""Table of rules: which primitives may run in half precision, and the frozen `Lists` that users edit.

The categories and their meaning come from TensorFlow's rewrite (auto_mixed_precision_lists.h), applied to the
primitives of JAX:

  allow: always half, because matrix units make it fast, and they sum in float32.
  infer: half between allow ops, unless an unsafe op comes before.
  deny: always float32, and infer ops after it too: small or large results, long sums.
  clear: rounds nothing, and follows its neighbors.

Other primitives are unlisted: they run in float32 and stop every propagation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive, primitives

from mixedres._internal.jaxprs.control_flow import STRUCTURE
from mixedres._internal.names import LEVELS
from mixedres._internal.types import DType

CATEGORIES = ("allow", "infer", "deny", "clear")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ALLOW = _names("dot_general conv_general_dilated ragged_dot ragged_dot_general")

# The result may leave the range of float16 or need more digits than half has: softmax, losses.
DENY_RANGE = _names("""
    exp exp2 expm1 log log1p log2 pow erf_inv lgamma digamma polygamma igamma igammac igamma_grad_a random_gamma_grad
    zeta bessel_i0e bessel_i1e regularized_incomplete_beta sinh cosh tan asin acos asinh acosh atanh cumprod
    cumlogsumexp reduce_prod nextafter fft
""")
# Solvers and decompositions, which enlarge the rounding errors of their matrix.
SOLVERS = _names("""
    cholesky cholesky_update qr geqrf geqp3 eig eigh svd lu lu_pivots_to_permutation triangular_solve
    householder_product ormqr schur hessenberg tridiagonal tridiagonal_solve linear_solve custom_linear_solve
""")
# Sums and squares: computed in float32, but results derived from them (a normalized activation) fit into half.
# Those over devices exchange their operand in its dtype.
COLLECTIVE_SUMS = _names("""
    psum psum2 psum_invariant reduce_scatter psum_scatter unreduced_psum unreduced_reduce_scatter
""")
DENY_SUMS = COLLECTIVE_SUMS | _names("""
    reduce_sum cumsum reduce_window_sum scatter-add scatter_add scatter-mul scatter_mul scatter-sub scatter_sub
    integer_pow square sqrt rsqrt cbrt symmetric_product
""")
# On the deny list only because of their range, which bfloat16 has.
BFLOAT16_INFER = _names("integer_pow square")
INFER = _names("""
    add sub mul div rem add_any tanh logistic erf erfc sin cos atan atan2 select_and_scatter_add reciprocal
    one_minus_square
""")
CLEAR = _names("""
    neg abs sign floor ceil round max min clamp select_n broadcast_in_dim broadcast_to reshape squeeze expand_dims
    transpose rev slice dynamic_slice dynamic_update_slice concatenate pad gather split stack unstack tile scatter
    scatter-max scatter_max scatter-min scatter_min reduce_max reduce_min argmax argmin reduce_window_max
    reduce_window_min cummax cummin sort top_k approx_top_k select_and_gather_add eq ne lt le gt ge eq_to lt_to le_to
    is_finite copy copy_p stop_gradient name optimization_barrier convert_element_type device_put sharding_constraint
    mesh_cast reshard layout_constraint pvary pbroadcast pcast all_gather all_gather_invariant all_to_all ppermute pmax
    pmin real zeros_like
""")

# Binary ops with an operand that may be smaller than the result, and ops that repeat elements of their operand. The
# gradient of a repeated operand is a sum, so such an operand is read in float32 and its gradient summed in float32.
BROADCASTING = _names("add sub mul div rem atan2 max min clamp")
EXTREMES = _names("max min")
COPIES = _names("gather broadcast_in_dim broadcast_to tile")
# Largest number of half cotangents that are added in half, such as those of the gates of a cell. A longer sum would be
# rounded as often as it has parts.
MOST_IN_HALF = 8
WINDOW_EXTREMES = ("reduce_window_max", "reduce_window_min")
# Ops whose results all may be one element of the operand.
RUNNING_EXTREMES = _names("cummax cummin")
# Ops that join operands, of which one may be given several times.
JOINS = _names("concatenate stack")
# Ops that copy a value to several devices, so that its gradient is a sum over devices. The last two also join slices.
DEVICE_COPIES = _names("pvary pcast pbroadcast")
GATHERS = _names("all_gather all_gather_invariant")

# Primitives outside `jax.extend.core.primitives` that are unlisted on purpose: their effect on a value is unknown, or
# they use its bits.
UNLISTED = _names("""
    reduce_precision bitcast_convert_type iota random_bits random_wrap random_unwrap random_clone pure_callback
    io_callback debug_callback debug_print ffi_call pallas_call reduce reduce_window custom_partitioning
    custom_vmap_call composite linear_call run_state core_map call_exported polynomial cudnn_fusion
    dot_product_attention_fwd dot_product_attention_bwd scaled_dot scaled_matmul imag conj complex
""")


# Products of `jax.experimental.sparse`. They sum in the dtype of their operands, so they stay float32.
SPARSE_PRODUCTS = _names("""
    bcoo_dot_general bcoo_dot_general_sampled bcoo_spdot_general bcsr_dot_general coo_matmat coo_matvec csr_matmat
    csr_matvec
""")


class OwnName(str):
    """Name of a user-defined primitive that was passed as a `Primitive`."""

    __slots__ = ()


def known_primitives() -> frozenset[str]:
    """Returns the names that a list may contain: the public primitives of JAX, and the names in this file."""
    public = frozenset(value.name for name, value in vars(primitives).items() if name.endswith("_p"))
    return (public | ALLOW | DENY_RANGE | SOLVERS | DENY_SUMS | INFER | CLEAR | UNLISTED) - STRUCTURE


@dataclasses.dataclass(frozen=True)
class Lists:
    """Lists of primitive names. A primitive on no list runs in float32 and stops every propagation.

        autocast(fn, lists=Lists().replace({"deny": {"tanh"}}))

    The defaults are the lists of float16; `Lists.default("bfloat16")` has those of bfloat16.

    Attributes:
      allow: primitives that always run in half: names as in a jaxpr ('dot_general') or `jax.extend.core.Primitive`.
      infer: primitives that run in half between allow operations, if nothing denied comes before.
      deny: primitives that run in float32, such as 'reduce_sum'.
      clear: primitives that follow their neighbors.

    Raises:
      ValueError: for a name that is on two lists, is unknown to JAX, or is a call (jit, scan, ...).
      TypeError: for values that are not names.
    """

    allow: frozenset[str] = ALLOW
    infer: frozenset[str] = INFER
    deny: frozenset[str] = DENY_RANGE | SOLVERS | DENY_SUMS
    clear: frozenset[str] = CLEAR

    def __post_init__(self) -> None:
        for category, names in _checked({name: getattr(self, name) for name in CATEGORIES}).items():
            object.__setattr__(self, category, names)

    @functools.cached_property
    def _by_name(self) -> dict[str, str]:
        return {name: category for category in CATEGORIES for name in getattr(self, category)}

    def category(self, name: str | Primitive) -> str:
        """Returns the list of a primitive: 'allow', 'infer', 'deny', 'clear' or 'unlisted'."""
        return self._by_name.get(name.name if isinstance(name, Primitive) else name, "unlisted")

    def replace(self, changes: Mapping[str, Iterable[Any]]) -> Lists:
        """Returns lists in which names are moved to the lists in `changes`, such as {'deny': {'tanh'}}.

        The key 'unlisted' removes names from every list.

        Raises:
          ValueError: for an unknown list, a name with two keys, unknown to JAX, or of a call such as 'jit' or 'scan'.
          TypeError: for values that are not names.
        """
        if unknown := [key for key in changes if key not in (*CATEGORIES, "unlisted")]:
            raise ValueError(f"{unknown[0]!r} is not a list; use {', '.join(CATEGORIES)} or unlisted")
        targets = _checked(changes)
        moved = frozenset().union(*targets.values())
        return Lists(**{key: (getattr(self, key) - moved) | targets.get(key, frozenset()) for key in CATEGORIES})

    def at_level(self, level: str) -> Lists:
        """Returns the lists changed by `level`.

        'default' changes nothing. 'allow_only' empties infer, deny and clear, so that only products run in half, each
        between two casts (TENSOR_CORES_ONLY in TensorFlow). 'infer_as_deny' moves the infer ops to the deny list
        (TREAT_INFER_AS_DENY in TensorFlow); a clear op after them is still half if only half ops read its result.

        Raises:
          ValueError: for another level.
        """
        if level == "default":
            return self
        if level == "allow_only":
            return Lists(allow=self.allow, infer=frozenset(), deny=frozenset(), clear=frozenset())
        if level == "infer_as_deny":
            return Lists(allow=self.allow, infer=frozenset(), deny=self.deny | self.infer, clear=self.clear)
        raise ValueError(f"level {level!r} is unknown; use one of {', '.join(LEVELS)}")

    @classmethod
    def default(cls, dtype: DType) -> Lists:
        """Returns the default lists of float16, or for any other dtype those of bfloat16.

        bfloat16 has the range of float32, so squares and integer powers may be half.
        """
        return cls() if jnp.dtype(dtype) == jnp.float16 else cls().replace({"infer": BFLOAT16_INFER})

    @classmethod
    def parse(cls, lists: Lists | Mapping[str, Iterable[Any]] | None, dtype: DType) -> Lists:
        """Returns `lists` itself if it is a `Lists`; else the default lists of `dtype`, changed by the mapping.

        Raises:
          TypeError: for other `lists`, and see `replace`.
          ValueError: see `replace`.
        """
        if lists is None:
            return cls.default(dtype)
        if isinstance(lists, Lists):
            return lists
        if isinstance(lists, Mapping):
            return cls.default(dtype).replace(lists)
        raise TypeError(f"lists must be a Lists, a dict such as {{'deny': {{'tanh'}}}} or None, got {lists!r}")


def _checked(lists: Mapping[str, Iterable[Any]]) -> dict[str, frozenset[str]]:
    """Returns the lists with primitives as names; raises an error for a name that is unknown or on two lists."""
    checked = {category: _names_of(category, names) for category, names in lists.items()}
    seen: dict[str, str] = {}
    for category, names in checked.items():
        for name in sorted(names):
            if name in seen:
                raise ValueError(f"{name!r} is on two lists, {seen[name]!r} and {category!r}; leave it on one")
            seen[name] = category
    return checked


def _names_of(category: str, names: Iterable[Any]) -> frozenset[str]:
    if isinstance(names, (str, Primitive)):
        names = (names,)
    if not isinstance(names, Iterable):
        raise TypeError(f"the {category} list must contain names of primitives, got {names!r}")
    known, checked = known_primitives(), set()
    for name in names:
        if isinstance(name, Primitive):
            name = OwnName(name.name)
        if not isinstance(name, str):
            raise TypeError(f"the {category} list must contain names of primitives, got {name!r}")
        if name in STRUCTURE:
            raise ValueError(f"{name!r} is a call: its body is colored, so it cannot be on a list")
        if name not in known and not isinstance(name, OwnName):
            raise ValueError(
                f"{name!r}, on the {category} list, is not a primitive of JAX; jax.make_jaxpr(fn)(*args) shows names"
            )
        checked.add(name)
    return frozenset(checked)
