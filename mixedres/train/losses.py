"""Cross-entropy, mixup and top-k counts: float32 in, float32 out."""

import jax
import jax.numpy as jnp

from mixedres._internal.types import Batch


def cross_entropy(logits: jax.Array, labels: jax.Array, label_smoothing: float = 0.0) -> jax.Array:
    """Computes the softmax cross-entropy of each example, in nats: (batch,) in the dtype of the logits.

    With smoothing s the target is ``(1 - s) * onehot + s / num_classes`` (Szegedy et al., arXiv 1512.00567). `logits`:
    (batch, num_classes). Raises TypeError for half-precision logits: a half-precision softmax loses the tail.
    """
    if logits.dtype not in (jnp.float32, jnp.float64):
        raise TypeError(f"logits must be float32 or float64, got {logits.dtype}; cast them first")
    # Not optax.softmax_cross_entropy_with_integer_labels, which subtracts the label's logit from log-sum-exp: at logits
    # of 65504 the loss is 1e-3 off. Gradients of softmax_cross_entropy with smooth_labels differ in the last bit.
    log_probs = jax.nn.log_softmax(logits)
    loss = -jnp.take_along_axis(log_probs, labels[:, None], axis=1)[:, 0]
    if label_smoothing:
        loss = (1.0 - label_smoothing) * loss - label_smoothing * log_probs.mean(axis=1)
    return loss


def mixup(batch: Batch, key: jax.Array, alpha: float) -> Batch:
    """Returns the batch in which each image is a weighted mean with its partner, the image at the mirrored place.

    The weight w is drawn once for the batch from Beta(alpha, alpha) (Zhang et al., arXiv 1710.09412). The larger of w
    and 1 - w belongs to the image itself, so that its label is the one that counts in top-1. `batch`: 'image' (b, h, w,
    c) uint8 or float and 'label' (b,) integers. Returns 'image' float32, 'label', 'other_label' (b,) of the partners,
    and 'weight' (b,) float32, in [0.5, 1].
    """
    drawn = jax.random.beta(key, alpha, alpha, dtype=jnp.float32)
    weight = jnp.maximum(drawn, 1.0 - drawn)
    images = batch["image"].astype(jnp.float32)
    mixed = weight * images + (1.0 - weight) * images[::-1]
    labels = batch["label"]
    return {"image": mixed, "label": labels, "other_label": labels[::-1], "weight": jnp.full(labels.shape, weight)}


def mixed_cross_entropy(logits: jax.Array, batch: Batch, label_smoothing: float = 0.0) -> jax.Array:
    """Computes `cross_entropy` with the labels of a batch, weighted with the labels of partners after `mixup`."""
    loss = cross_entropy(logits, batch["label"], label_smoothing)
    if "weight" not in batch:
        return loss
    other = cross_entropy(logits, batch["other_label"], label_smoothing)
    weight: jax.Array = batch["weight"]
    return weight * loss + (1.0 - weight) * other


def in_top_k(logits: jax.Array, labels: jax.Array, k: int) -> jax.Array:
    """Returns for each example whether the label is among the k largest logits.

    Equal logits, which are common in half precision, rank by index, so that top-1 is argmax. An example with a NaN
    among its logits or with a label out of range is wrong, although no logit is larger.
    """
    true = jnp.take_along_axis(logits, labels[:, None], axis=1)
    classes = jnp.arange(logits.shape[1])[None]
    ahead = (logits > true) | ((logits == true) & (classes < labels[:, None]))
    known = (labels >= 0) & (labels < logits.shape[1])
    return (ahead.sum(axis=1) < k) & known & ~jnp.isnan(logits).any(axis=1)
