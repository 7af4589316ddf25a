"""Losses of optax on the outputs of a small network; by hand, the network is cast to half and the loss is float32."""

import jax
import jax.numpy as jnp
import optax

from tests.strangers.programs import by_hand, integers, matrices, normal, program

ROWS, SIZE, HIDDEN, CLASSES = 48, 32, 64, 10


def network(params, x):
    """Two layers with softplus between."""
    return jax.nn.softplus(x @ params["first"]) @ params["second"]


def under(loss, target, *, time=None):
    """The mean of loss(outputs, target); `time`: the inputs are sequences."""
    params = matrices(0, first=(SIZE, HIDDEN), second=(HIDDEN, CLASSES))
    shape = (ROWS, SIZE) if time is None else (4, time, SIZE)
    return program(by_hand(network), lambda y, to: jnp.mean(loss(y, to)), params, normal(1, *shape), target)


def ctc():
    """Connectionist temporal classification of 12 steps to 4 labels."""

    def loss(logits, labels):
        return optax.ctc_loss(logits, jnp.zeros(logits.shape[:2]), labels, jnp.zeros(labels.shape))

    return under(loss, 1 + integers(2, CLASSES - 1, 4, 4), time=12)


def kl(logits, targets):
    """The divergence of predictions from soft targets."""
    return optax.losses.kl_divergence(jax.nn.log_softmax(logits), targets)


def triplet(outputs, _):
    """Anchors, positives and negatives are thirds of the batch."""
    return optax.losses.triplet_margin_loss(*jnp.split(outputs, 3), margin=8.0)


LABELS = ROWS, CLASSES
PROGRAMS = {
    "optax ctc": ctc,
    "optax sigmoid focal": lambda: under(optax.losses.sigmoid_focal_loss, 1.0 * (normal(2, *LABELS) > 0)),
    "optax kl": lambda: under(kl, jax.nn.softmax(normal(2, *LABELS))),
    "optax cosine": lambda: under(optax.losses.cosine_distance, normal(2, *LABELS)),
    "optax huber": lambda: under(optax.losses.huber_loss, normal(2, *LABELS)),
    "optax log_cosh": lambda: under(optax.losses.log_cosh, normal(2, *LABELS)),
    "optax ntxent": lambda: under(optax.losses.ntxent, integers(2, 8, ROWS)),
    "optax triplet": lambda: under(triplet, normal(2, 1)),
    "optax multiclass hinge": lambda: under(optax.losses.multiclass_hinge_loss, integers(2, CLASSES, ROWS)),
    "optax sparsemax": lambda: under(optax.losses.multiclass_sparsemax_loss, integers(2, CLASSES, ROWS)),
}
