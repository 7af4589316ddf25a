"""The lists: their defaults, how a user moves names, and how mistakes are refused; and the patterns beside them."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive, primitives

from mixedres.amp import Lists, autocast, explain
from mixedres.amp._patterns import PATTERNS
from mixedres.amp._rules import CATEGORIES, STRUCTURE, known_primitives
from tests.amp.graphs import error
from tests.arrays import normal

LISTS = Lists()
PUBLIC = sorted({value.name for name, value in vars(primitives).items() if name.endswith("_p")})


def test_lists_of_names_become_frozen_sets():
    same = Lists(**{category: list(getattr(LISTS, category)) for category in CATEGORIES})
    assert all(isinstance(getattr(same, category), frozenset) for category in CATEGORIES)
    assert same == LISTS != LISTS.replace({"deny": {"tanh"}}) and hash(same) == hash(LISTS)


@pytest.mark.parametrize(
    ("category", "members"),
    [
        ("allow", "dot_general conv_general_dilated ragged_dot_general"),
        ("infer", "add sub mul div tanh logistic erf select_and_scatter_add"),
        # Large slopes or results; enlarged rounding errors; sums and squares.
        ("deny", "exp exp2 expm1 log log1p log2 pow erf_inv lgamma digamma"),
        ("deny", "sinh cosh tan asin acos acosh atanh cumprod"),
        ("deny", "cholesky qr eigh svd lu triangular_solve tridiagonal_solve custom_linear_solve"),
        ("deny", "reduce_sum cumsum psum integer_pow square sqrt rsqrt cbrt scatter-add"),
        ("clear", "max neg select_n broadcast_in_dim transpose gather sort reduce_max convert_element_type all_gather"),
        ("unlisted", "reduce_precision bitcast_convert_type pure_callback pallas_call reduce no_such_primitive"),
    ],
)
def test_category_of_each_primitive(category, members):
    assert {LISTS.category(name) for name in members.split()} == {category}


def test_bfloat16_may_square():
    half, brain = Lists.default(jnp.float16), Lists.default(jnp.bfloat16)
    assert half == Lists() and brain.infer - half.infer == half.deny - brain.deny == {"integer_pow", "square"}
    assert (brain.allow, brain.clear) == (half.allow, half.clear)


def test_of_takes_none_lists_and_moves():
    assert Lists.parse(None, jnp.bfloat16) == Lists.default(jnp.bfloat16)
    # Lists are taken as they are, a mapping changes the default of the dtype.
    assert Lists.parse(LISTS, jnp.bfloat16) is LISTS
    assert Lists.parse({"deny": {"tanh"}}, jnp.bfloat16) == Lists.default(jnp.bfloat16).replace({"deny": {"tanh"}})


def test_moved_names_leave_their_former_list():
    moved = LISTS.replace({"deny": {"tanh"}})
    assert moved == Lists(LISTS.allow, LISTS.infer - {"tanh"}, LISTS.deny | {"tanh"}, LISTS.clear)
    assert LISTS.category("tanh") == "infer"
    moved = LISTS.replace({"deny": ["tanh", "max"], "infer": ("exp",), "unlisted": {"dot_general"}})
    found = {name: moved.category(name) for name in ("tanh", "max", "exp", "dot_general", "sin")}
    assert found == {"tanh": "deny", "max": "deny", "exp": "infer", "dot_general": "unlisted", "sin": "infer"}


def test_moving_a_name_to_its_own_list_changes_nothing():
    assert LISTS.replace({"infer": {"tanh"}, "unlisted": {"reduce_precision"}}) == LISTS
    assert LISTS.replace({}) == LISTS and LISTS.replace({"deny": "tanh"}) == LISTS.replace({"deny": {"tanh"}})
    assert LISTS.replace({"deny": primitives.tanh_p}) == LISTS.replace({"deny": {"tanh"}})


def test_primitive_of_ones_own():
    own = Primitive("my_activation")
    lists = LISTS.replace({"infer": {own}})
    assert lists.category("my_activation") == "infer"
    # Its name stays known: lists that hold it can be moved, leveled and made again.
    assert lists.replace({"deny": {"tanh"}}).category("my_activation") == "infer"
    assert lists.replace({"deny": {own}}).category("my_activation") == "deny"
    assert lists.replace({"deny": {own}}).infer == LISTS.infer
    assert lists.at_level("infer_as_deny").category("my_activation") == "deny"
    assert dataclasses.replace(lists) == lists
    with pytest.raises(ValueError, match="'my_activation', on the infer list, is not a primitive of JAX"):
        LISTS.replace({"infer": {"my_activation"}})  # the name alone


def test_every_public_primitive_can_be_moved_and_no_call():
    for name in PUBLIC:
        if name not in STRUCTURE:
            assert all(LISTS.replace({c: {name}}).category(name) == c for c in (*CATEGORIES, "unlisted"))
    for name in STRUCTURE:
        with pytest.raises(ValueError, match=f"'{name}' is a call: its body is colored"):
            LISTS.replace({"deny": {name}})
        assert name not in known_primitives()


@pytest.mark.parametrize(
    ("lists", "kind", "message"),
    [
        ({"deny": {"tanh"}, "clear": {"tanh"}}, ValueError, "'tanh' is on two lists"),
        ({"deny": {"tanh"}, "unlisted": {"tanh"}}, ValueError, "'tanh' is on two lists, 'deny'"),
        ({"deny": {"tahn"}}, ValueError, "'tahn', on the deny list, is not a primitive of JAX"),
        ({"deny": 3}, TypeError, "the deny list must contain names of primitives, got 3"),
        ({"deny": {jnp.tanh}}, TypeError, "the deny list must contain names of primitives, got"),
    ],
)
def test_mistake_is_named(lists, kind, message):
    with pytest.raises(kind, match=message):
        LISTS.replace(lists)
    with pytest.raises(ValueError, match="'exp' is on two lists, 'infer' and 'deny'; leave it"):
        Lists(infer=LISTS.infer | {"exp"})


@pytest.mark.parametrize("make", [autocast, explain])
def test_mistake_is_named_before_any_call(make):
    with pytest.raises(ValueError, match="'denied' is not a list"):
        make(jnp.tanh, lists={"denied": {"tanh"}})
    with pytest.raises(TypeError, match="lists must be a Lists"):
        make(jnp.tanh, lists="tanh")
    with pytest.raises(ValueError, match="level 'O2' is unknown; use one of default, allow_only, infer_as_deny"):
        make(jnp.tanh, level="O2")


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern_occurs_in_its_example(name):
    """In half where the name says so, else in float32; and the result is that of float32 up to half's rounding."""
    x, w = normal(0, (16, 16)), normal(1, (16, 16), 0.25) + 2 * jnp.eye(16)
    program = eval(f"lambda x, w: {PATTERNS[name].example}", {"jax": jax, "jnp": jnp})
    found = [d for d in explain(program)(x, w).decisions if d.reason.startswith(PATTERNS[name].reason)]
    half = name in ("activation", "solver", "divisor", "result")
    assert found and {d.dtype.name for d in found} == {"float16" if half else "float32"}
    assert 0 < error(autocast(program)(x, w), program(x, w)) < 5e-3
