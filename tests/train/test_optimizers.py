"""Schedules against numbers by hand, optimizers against loops in float64, the mask on a network."""

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixedres import models, precision, registry
from mixedres._internal import names
from mixedres.train import optimizers


def rates(name, steps, **options):
    rate = optimizers.schedule(name, **options)
    return [float(rate(step)) for step in steps]


def half_cosine(x):
    return 0.5 * (1 + math.cos(math.pi * x))


WARM = {"peak": 4.0, "total_steps": 110, "warmup_steps": 10}
STEPS_OF_WARM = [0, 5, 10, 35, 60, 85, 110, 500]


def test_command_line_knows_the_options_of_the_functions():
    takes = {name: tuple(inspect.getfullargspec(build).kwonlyargs) for name, build in registry.OPTIMIZERS.items()}
    assert takes == names.OPTIMIZERS and tuple(models.INITIALIZERS) == names.INITIALIZERS
    with pytest.raises(ValueError, match=r"layer_decay=0\.5 is not an option of sgd, only of no optimizer"):
        optimizers.create("sgd", lambda count: 0.1, layer_decay=0.5)


@pytest.mark.parametrize(
    ("name", "options", "shape"),
    [
        ("cosine", {"end_factor": 0.1}, lambda x: 0.1 + 0.9 * half_cosine(x)),
        ("cosine", {}, half_cosine),
        ("polynomial", {}, lambda x: (1 - x) ** 2),
        ("polynomial", {"power": 3.0, "end_factor": 0.5}, lambda x: 0.5 + 0.5 * (1 - x) ** 3),
        ("constant", {}, lambda x: 1.0),
    ],
)
def test_schedule_follows_the_formula(name, options, shape):
    """From 0 to the peak in the warm-up, then the shape, which stays where it ends, and never below 0."""
    found = rates(name, STEPS_OF_WARM, **WARM, **options)
    expected = [0, 2.0, *(4 * shape(x) for x in (0, 0.25, 0.5, 0.75, 1, 1))]
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
    assert min(found) >= 0


@pytest.mark.parametrize("warmup", [0, 7])
def test_piecewise_schedule_has_exact_rates(warmup):
    """The formula in plain float32: the rate times the last factor whose boundary lies behind; compiled, almost."""
    boundaries, factors = (5, 9, 30), (0.3, 0.0, 0.07)
    options = {"peak": 0.1, "total_steps": 50, "warmup_steps": warmup}
    rate = optimizers.schedule("piecewise", boundaries=boundaries, factors=factors, **options)
    compiled = jax.jit(rate)
    for step in range(50):
        value = rate(jnp.asarray(step, jnp.int32))
        np.testing.assert_allclose(compiled(step), value, rtol=1e-6)
        shape = np.float32([1.0, *(f for b, f in zip(boundaries, factors, strict=True) if step > b)][-1])
        warm = np.minimum(np.float32(step) / np.float32(warmup), np.float32(1)) if warmup else np.float32(1)
        assert (value.dtype, value.shape) == (jnp.float32, ())
        assert value == np.float32(0.1) * warm * shape, step


@pytest.mark.parametrize("name", ["constant", "cosine", "polynomial", "piecewise"])
def test_warm_up_longer_than_the_run(name):
    # A short run of a long recipe only climbs.
    found = rates(name, range(11), peak=3.0, total_steps=10, warmup_steps=30)
    np.testing.assert_allclose(found, [i / 10 for i in range(11)], rtol=1e-6)


STEPS, DECAY = 5, 0.03
SHAPES = {"kernel": (4, 3), "bias": (3,), "scale": (3,)}


def weights():
    rng = np.random.default_rng(0)
    return {key: rng.normal(size=shape) for key, shape in SHAPES.items()}


def gradient(step, key):
    return np.random.default_rng((step, len(key))).normal(size=weights()[key].shape)


def rate_at(step):
    return 0.1 / (1 + step)


def trained(name, **options):
    """Parameters after STEPS compiled steps; the rate changes with every one."""
    tx = optimizers.create(name, rate_at, weight_decay=DECAY, **options)
    params = {"layer": jax.tree.map(jnp.float32, weights())}
    state, update = tx.init(params), jax.jit(tx.update)
    for step in range(STEPS):
        grads = {"layer": {key: jnp.float32(gradient(step, key)) for key in weights()}}
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params["layer"]


def check(params, rule, rtol=2e-5):
    """Compares with `rule(step, key, w, g, memory) -> w`, a plain loop in float64."""
    for key, w in weights().items():
        memory = {}
        for step in range(STEPS):
            w = rule(step, key, w, gradient(step, key), memory)
        np.testing.assert_allclose(params[key], w, rtol=rtol, atol=rtol / 10, err_msg=key)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_follows_the_formula(momentum, nesterov, inside):
    """With the rate inside the momentum, Keras' formulas: v = m v - rate g, then w += v or w += m v - rate g."""

    def rule(step, key, w, g, memory):
        # Coupled: the decay goes through the momentum, and the rate does not, unless it is inside.
        g = (g + DECAY * w * (key == "kernel")) * (rate_at(step) if inside else 1)
        v = memory["v"] = momentum * memory.get("v", 0) + g
        return w - (g + momentum * v if nesterov else v) * (1 if inside else rate_at(step))

    check(trained("sgd", momentum=momentum, nesterov=nesterov, rate_in_momentum=inside), rule)


def test_adamw_follows_the_formula():
    beta1, beta2, epsilon = 0.8, 0.95, 1e-3

    def rule(step, key, w, g, memory):
        m = memory["m"] = beta1 * memory.get("m", 0) + (1 - beta1) * g
        v = memory["v"] = beta2 * memory.get("v", 0) + (1 - beta2) * g**2
        m_hat, v_hat = m / (1 - beta1 ** (step + 1)), v / (1 - beta2 ** (step + 1))
        # Decoupled: the decay is not divided by the deviation of the gradient.
        return w - rate_at(step) * ((m_hat / (np.sqrt(v_hat) + epsilon)) + DECAY * w * (key == "kernel"))

    check(trained("adamw", momentum=beta1, beta2=beta2, epsilon=epsilon), rule)


@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_follows_the_formula(nesterov):
    momentum, trust = 0.9, 0.02

    def rule(step, key, w, g, memory):
        if key == "kernel":
            g = g + DECAY * w
            g = g * trust * np.linalg.norm(w) / np.linalg.norm(g)
        # The rate is inside the momentum, as in the paper's algorithm 1.
        v = memory["v"] = momentum * memory.get("v", 0) + rate_at(step) * g
        return w - (rate_at(step) * g + momentum * v if nesterov else v)

    check(trained("lars", momentum=momentum, trust_coefficient=trust, nesterov=nesterov), rule)


def orthogonalized(matrix, epsilon):
    """Newton-Schulz in float64 with the coefficients of Jordan et al.: singular values go to about 1."""
    x = matrix / (np.linalg.norm(matrix) + epsilon)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x


@pytest.mark.parametrize(("nesterov", "shape"), [(False, (4, 3)), (True, (2, 2, 3, 16))])
def test_muon_follows_the_formula(nesterov, shape, monkeypatch):
    monkeypatch.setitem(SHAPES, "kernel", shape)
    beta, beta2, epsilon = 0.8, 0.95, 1e-8
    rows, columns = math.prod(shape[:-1]), shape[-1]

    def corrected(average, step):
        return average / (1 - beta ** (step + 1))

    def rule(step, key, w, g, memory):
        m = memory["m"] = beta * memory.get("m", 0) + (1 - beta) * g
        ahead = beta * corrected(m, step + 1) + (1 - beta) * corrected(g, step) if nesterov else corrected(m, step)
        if key == "kernel":
            moved = orthogonalized(ahead.reshape(rows, columns), epsilon) * max(1, columns / rows) ** 0.5
            return w - rate_at(step) * (moved.reshape(shape) + DECAY * w)
        v = memory["v"] = beta2 * memory.get("v", 0) + (1 - beta2) * g**2
        return w - rate_at(step) * ahead / (np.sqrt(v / (1 - beta2 ** (step + 1))) + epsilon)

    options = {"momentum": beta, "nesterov": nesterov, "beta2": beta2, "epsilon": epsilon}
    check(trained("muon", **options), rule, rtol=2e-4)


# With the empty mask everything decays, as in the reference for CIFAR.
@pytest.mark.parametrize(("mask", "decayed"), [("^/layer/scale$", {"scale"}), ("", {"kernel", "bias", "scale"})])
def test_mask_selects_decayed_parameters(mask, decayed):
    def rule(step, key, w, g, memory):
        return w - rate_at(step) * (g + DECAY * w * (key in decayed))

    check(trained("sgd", momentum=0.0, decay_mask=mask), rule)


def test_clipping_comes_before_the_decay():
    grads = {"kernel": np.float32([6, 0]), "bias": np.float32([0, 8])}  # of norm 10
    params = {"kernel": np.float32([1, 2]), "bias": np.float32([1, 1])}
    for clip_norm, factor in ((5.0, 0.5), (20.0, 1.0), (0.0, 1.0)):
        tx = optimizers.create("sgd", lambda count: 2.0, clip_norm=clip_norm, momentum=0.0, weight_decay=0.25)
        updates, _ = tx.update(grads, tx.init(params), params)
        # By hand: a gradient of 6 and 8 at norm 10, and a quarter of the kernel, unclipped.
        np.testing.assert_allclose(
            updates["kernel"], -2 * (factor * grads["kernel"] + 0.25 * params["kernel"]), rtol=2e-5
        )
        np.testing.assert_allclose(updates["bias"], -2 * factor * grads["bias"], rtol=2e-5)


@pytest.mark.parametrize("version", ["1", "2"])
def test_mask_selects_exactly_the_kernels_of_a_network(version):
    """Stem, head, two convolutions in each of three blocks, and projections in two: what has more than one axis."""
    model = models.create("cifar_resnet8", num_classes=10, policy=precision.get("fp32").policy, version=version)
    images = jax.ShapeDtypeStruct((1, 8, 8, 3), jnp.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
    mask = optimizers.path_mask(optimizers.KERNELS)(shapes)
    assert mask == jax.tree.map(lambda leaf: leaf.ndim > 1, shapes) and sum(jax.tree.leaves(mask)) == 10


def test_layer_decay_shrinks_with_the_distance_to_the_head():
    names = ["stem_conv", "stem_norm", "block_layer1_2", "block_layer1_10", "block_layer2_1", "final_norm", "head"]
    grads = {name: {"kernel": np.ones(3, np.float32)} for name in names}
    tx = optimizers.with_layer_decay(optimizers.create("sgd", lambda count: 1.0, momentum=0.0), 0.5)
    updates, _ = tx.update(grads, tx.init(grads), grads)
    found = {name: float(-updates[name]["kernel"][0]) for name in names}
    expected = {"head": 1, "final_norm": 1, "block_layer2_1": 1 / 2, "block_layer1_10": 1 / 4, "block_layer1_2": 1 / 8}
    assert found == expected | {"stem_conv": 1 / 16, "stem_norm": 1 / 16}


def test_frozen_leaves_have_no_optimizer_state():
    params = {"head": {"kernel": np.float32([1, 2])}, "stem": {"kernel": np.float32([-0.0, 3])}}
    tx = optimizers.train_only(optimizers.create("sgd", lambda count: 1.0, weight_decay=0.1), "^/head/")
    state = tx.init(params)
    assert sum(leaf.size for leaf in jax.tree.leaves(state) if leaf.ndim) == 2
    updates, _ = tx.update(jax.tree.map(np.ones_like, params), state, params)
    kept = params["stem"]["kernel"] + np.asarray(updates["stem"]["kernel"])
    assert kept.tobytes() == params["stem"]["kernel"].tobytes()
    np.testing.assert_allclose(updates["head"]["kernel"], [-1.1, -1.2])
