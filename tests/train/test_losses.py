"""Cross-entropy against float64, top-k counts against JAX's own."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hypothesis_numpy
from scipy import special

from mixedres.train import losses as our_losses


def reference(logits, labels, smoothing):
    """(losses, gradients of their sum) in float64: minus target times log probability, summed."""
    logits, classes = np.asarray(logits, np.float64), logits.shape[1]
    target = (1 - smoothing) * np.eye(classes)[labels] + smoothing / classes
    # The target sums to one, so the gradient is softmax minus target.
    return -(target * special.log_softmax(logits, 1)).sum(1), special.softmax(logits, 1) - target


def ordinary():
    rng = np.random.default_rng(0)
    return np.float32(3 * rng.normal(size=(64, 11))), rng.integers(0, 11, 64)


def extreme():
    """float16's largest numbers, and rows whose label is as unlikely as a float32 can say."""
    rng = np.random.default_rng(1)
    values = np.array([1e4, -1e4, 65504.0, -65504.0, 0.0])
    return np.float32(rng.choice(values, (64, 11))), rng.integers(0, 11, 64)


@partial(jax.jit, static_argnums=2)
@partial(jax.value_and_grad, has_aux=True)
def sum_of_losses(logits, labels, smoothing):
    losses = our_losses.cross_entropy(logits, labels, smoothing)
    return losses.sum(), losses


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("case", [ordinary, extreme])
def test_cross_entropy_and_its_gradient(case, smoothing):
    logits, labels = case()
    expected, expected_grads = reference(logits, labels, smoothing)
    (_, losses), grads = sum_of_losses(logits, labels, smoothing)
    assert losses.dtype == grads.dtype == jnp.float32
    np.testing.assert_allclose(losses, expected, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(grads, expected_grads, rtol=1e-5, atol=1e-6)


def test_float64_stays_float64():
    logits, labels = ordinary()
    with jax.enable_x64(True):
        losses = jax.jit(our_losses.cross_entropy, static_argnums=2)(logits.astype(np.float64), labels, 0.1)
        assert losses.dtype == jnp.float64
        np.testing.assert_allclose(losses, reference(logits, labels, 0.1)[0], rtol=1e-13)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int32"])
def test_half_precision_logits_are_refused(dtype):
    with pytest.raises(TypeError, match=f"float32 or float64, got {dtype}"):
        our_losses.cross_entropy(jnp.zeros((2, 3), dtype), jnp.zeros(2, jnp.int32))


# Few different values, so that ties are the rule; halves make them in earnest.
VALUES = st.sampled_from([0.0, 1.0, -1.0, 0.5, 65504.0, float("inf"), float("-inf")])
LOGITS = hypothesis_numpy.arrays(np.float32, (4, 7), elements=VALUES)
LABELS = hypothesis_numpy.arrays(np.int64, 4, elements=st.integers(0, 6))


@partial(jax.jit, static_argnums=2)
def rankings(logits, labels, k):
    """Ours, and the indices of JAX's top k, which has equal numbers in the order of their indices."""
    return our_losses.in_top_k(logits, labels, k), jax.lax.top_k(logits, min(k, logits.shape[1]))[1]


@settings(max_examples=75)
@given(LOGITS, LABELS, st.sampled_from((1, 2, 9)), st.sampled_from(["float32", "float16"]))
def test_in_top_k_with_ties(logits, labels, k, dtype):
    result, indices = rankings(logits.astype(dtype), labels, k)
    assert result.dtype == bool and result.tolist() == (np.asarray(indices) == labels[:, None]).any(1).tolist()


@pytest.mark.parametrize("k", [1, 3])
def test_nan_or_a_label_out_of_range_is_wrong(k):
    """One NaN is enough, at the label or elsewhere; the last rows have none."""
    nan = np.nan
    logits = np.float32([[nan] * 3, [nan, 1, 0], [0, nan, 1], [1, nan, 0], [0] * 3, [0] * 3, [0] * 3])
    ranked_in = jax.jit(our_losses.in_top_k, static_argnums=2)
    assert not np.any(ranked_in(logits, np.array([1, 0, 0, 0, 3, -1, 400]), k))


def test_mixup_is_the_loss_of_mixed_targets():
    """Against float64: images and one-hot targets mixed by the weight; weights as Beta(alpha, alpha) has them."""
    rng = np.random.default_rng(2)
    labels = rng.integers(0, 5, 6)
    batch = {"image": rng.integers(0, 256, (6, 4, 4, 3), np.uint8), "label": labels}
    draws = jax.jit(jax.vmap(lambda seed: our_losses.mixup(batch, jax.random.key(seed), 1.0)))(np.arange(1000))
    mixed = {name: np.asarray(values[1]) for name, values in draws.items()}
    weight = np.float64(mixed["weight"][0])
    assert 0.5 <= weight <= 1 and mixed["image"].dtype == np.float32
    expected = weight * np.float64(batch["image"]) + (1 - weight) * np.float64(batch["image"])[::-1]
    np.testing.assert_allclose(mixed["image"], expected, rtol=1e-6)
    logits = np.float32(rng.normal(size=(6, 5)))
    losses = [reference(logits, given, 0.1)[0] for given in (labels, labels[::-1])]
    found = jax.jit(our_losses.mixed_cross_entropy, static_argnums=2)(logits, mixed, 0.1)
    np.testing.assert_allclose(found, weight * losses[0] + (1 - weight) * losses[1], rtol=1e-5)
    assert np.mean(draws["weight"][:, 0]) == pytest.approx(0.75, abs=0.02)  # of the larger of w and 1 - w, w uniform
