"""The loss scales as pytrees: every field survives everything, in one dtype and one compilation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixedres.precision import DynamicLossScale, NoOpLossScale, StaticLossScale

COUNTERS = {"consecutive_skipped": 3, "total_skipped": 9}
RANGE = {"factor": 3.0, "min_loss_scale": 0.25, "max_loss_scale": 2.0**20}
# No value is a default: a field that is dropped comes back as something else.
VALUES = {
    NoOpLossScale: COUNTERS,
    StaticLossScale: {"loss_scale": 96.0, **COUNTERS},
    DynamicLossScale: {"loss_scale": 48.0, "counter": 5, "period": 11, **RANGE, **COUNTERS},
}
CLASSES = list(VALUES)
INTEGERS = {"counter", "period", "consecutive_skipped", "total_skipped"}


def build(cls):
    return cls(**VALUES[cls])


def fields(scale):
    """By name, read without the pytree machinery."""
    return {field.name: getattr(scale, field.name) for field in dataclasses.fields(scale)}


def donated(scale):
    # The buffers are reused, and those of the argument are gone.
    result = jax.jit(lambda x: jax.tree.map(lambda y: y * 1, x), donate_argnums=0)(scale)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(scale))
    return result


def batched(scale):
    two = jax.tree.map(lambda x: jnp.stack([x * 0, x]), scale)
    return jax.tree.map(lambda x: x[1], jax.vmap(lambda x: x)(two))


WAYS = {
    "donated": donated,
    "batched": batched,
    "looped": lambda scale: jax.lax.fori_loop(0, 2, lambda _, x: x, scale),
    "rebuilt": lambda scale: type(scale)(**fields(scale)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cls", CLASSES)
def test_every_field_survives(cls, way):
    result = WAYS[way](build(cls))
    assert type(result) is cls and fields(result) == VALUES[cls]
    for name, value in fields(result).items():
        assert value.dtype == (jnp.int32 if name in INTEGERS else jnp.float32), name


@pytest.mark.parametrize("cls", CLASSES)
def test_leaves_of_any_type(cls):
    # Shardings, masks and specs are trees of this structure; none of them is a number in range.
    sentinel = object()
    names = set(VALUES[cls])
    assert fields(jax.tree.map(lambda _: sentinel, build(cls))) == dict.fromkeys(names, sentinel)
    assert fields(jax.tree.map(lambda x: x is None, build(cls))) == dict.fromkeys(names, False)
    assert fields(jax.tree.map(lambda _: None, build(cls))) == dict.fromkeys(names)


KINDS = [float, int, np.float64, np.float16, jnp.bfloat16]


def signature(tree):
    named = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): (x.dtype.name, x.weak_type, x.shape) for path, x in named}


def strong(names):
    return {f".{name}": ("int32" if name in INTEGERS else "float32", False, ()) for name in names}


@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.__module__[:5]}.{kind.__name__}")
def test_every_leaf_is_strongly_typed(kind, x64):
    with jax.enable_x64(x64):
        given = {"loss_scale": 8, "period": 4, "factor": 2, "min_loss_scale": 4, "max_loss_scale": 64}
        dynamic = DynamicLossScale(**{name: kind(value) for name, value in given.items()})
        static = StaticLossScale(kind(8))
        for scale in (dynamic, static, NoOpLossScale()):
            expected = strong(fields(scale))
            assert signature(scale) == expected
            for finite in (True, jnp.asarray(False)):
                assert signature(scale.adjust(finite)) == expected
                assert signature(jax.eval_shape(type(scale).adjust, scale, finite)) == expected
            assert signature(scale.loss_scale) == {"": ("float32", False, ())}
        assert static.loss_scale == 8 and fields(dynamic).items() >= given.items()


def test_float64_values_stay_float64():
    with jax.enable_x64(True):
        third = jnp.asarray(1.0, jnp.float64) / 3
        for scale in (DynamicLossScale(), StaticLossScale(2.0**15)):
            assert scale.scale(third).dtype == scale.unscale(third).dtype == jnp.float64
            assert float(scale.scale(third)) == 2.0**15 / 3 and float(scale.unscale(third)) == 2.0**-15 / 3
