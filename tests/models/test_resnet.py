"""The networks against an independent float64 implementation, their sizes, their initial state."""

import functools
import math

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from mixedres.models import create
from tests.models import reference

FULL = jmp.get_policy("params=float32,compute=float32,output=float32")


def _images(shape, seed=1):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _key():
    # XLA compiles this generator several times faster than the default one.
    return jax.random.key(0, impl="rbg")


def _shapes(model, image_shape=(1, 32, 32, 3)):
    images = jax.ShapeDtypeStruct(image_shape, jnp.float32)
    return jax.eval_shape(model.init, jax.random.key(0), images)


def _count(name, num_classes, version=None):
    model = create(name, num_classes=num_classes, policy=FULL, version=version)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(_shapes(model)["params"]))


def _random_variables(model, seed=0):
    """Values for every leaf of which none is 0 or 1, such that no activation outgrows mean and bias."""
    rng = np.random.default_rng(seed)

    def value(path, leaf):
        name = path[-1].key
        if name == "kernel":
            return rng.normal(size=leaf.shape) * math.sqrt(2 / math.prod(leaf.shape[:-1]))
        if name == "scale":
            return rng.uniform(0.4, 0.8, leaf.shape)
        if name == "var":
            return rng.uniform(0.5, 1.5, leaf.shape)
        return 0.3 * rng.normal(size=leaf.shape)

    return jax.tree_util.tree_map_with_path(lambda path, leaf: value(path, leaf).astype(np.float32), _shapes(model))


def _relative(actual, expected):
    return np.abs(np.asarray(actual, np.float64) - expected).max() / np.abs(expected).max()


# --- sizes


@pytest.mark.parametrize(
    ("size", "count"),
    [
        # The counts everybody quotes (torchvision's), and by the same rules for 200.
        (18, 11_689_512),
        (34, 21_797_672),
        (50, 25_557_032),
        (101, 44_549_160),
        (152, 60_192_808),
        (200, 64_673_832),
    ],
)
def test_parameter_counts(size, count):
    # v1.5 moves a stride, which costs no parameter.
    assert _count(f"resnet{size}", 1000) == _count(f"resnet{size}", 1000, "1") == count


@pytest.mark.parametrize("n", [1, 3, 9])
def test_parameter_counts_of_cifar_networks(n):
    # Stage of width w: 2n convolutions of 9w² and 2n norms of 2w; the first convolution of the
    # second and third stage reads w/2 channels and is joined by a 1x1 projection (norm in v1 only).
    convs, norms, projections, projection_norms = 9 * 3 * 16, 2 * 16, 0, 0
    for width in (16, 32, 64):
        convs += 2 * n * 9 * width**2
        norms += 2 * n * 2 * width
        if width > 16:
            convs -= 9 * width * width // 2
            projections += width * width // 2
            projection_norms += 2 * width
    head = 64 * 10 + 10
    v1 = convs + norms + projections + projection_norms + head
    # v2 norms a block's input: the first of a stage has half the width; the stem's norm moves to
    # the end, where it has 64 features.
    v2 = convs + norms - 2 * 16 - 2 * 32 + 2 * (64 - 16) + projections + head
    assert _count(f"cifar_resnet{6 * n + 2}", 10, "1") == v1
    assert _count(f"cifar_resnet{6 * n + 2}", 10, "2") == v2


# --- values

FORWARD = [
    # (name, version, image shape); one is not square, one is of odd size.
    ("resnet50", "1.5", (2, 64, 64, 3)),
    ("resnet50", "1", (2, 64, 64, 3)),
    ("resnet50", "2", (2, 64, 96, 3)),
    ("resnet18", "1", (2, 75, 64, 3)),
    ("resnet18", "2", (2, 64, 64, 3)),
    ("cifar_resnet20", "1", (2, 32, 24, 3)),
    ("cifar_resnet20", "2", (2, 32, 32, 3)),
]


def _reference(name, variables, version, **options):
    cifar, depth = name.startswith("cifar_"), int(name.split("resnet")[1])
    return reference.ResNet(variables, depth, version, cifar=cifar, **options)


@pytest.mark.parametrize(("name", "version", "shape"), FORWARD)
def test_forward_in_eval_mode(name, version, shape):
    model = create(name, num_classes=10, policy=FULL, version=version, epsilon=1e-3)
    variables, images = _random_variables(model), _images(shape)
    forward = jax.jit(lambda v, x: model.apply(v, x, mutable=["intermediates"]))
    logits, state = forward(variables, images)
    expected = _reference(name, variables, version, epsilon=1e-3)
    # Fifty layers of float32 rounding, 1e-6 as measured; reduced-precision products would give 1e-3.
    assert _relative(logits, expected(images)) < 1e-5
    assert set(state["intermediates"]) == set(expected.activations)
    for layer, activation in expected.activations.items():
        assert np.isfinite(activation).all()
        assert _relative(state["intermediates"][layer][0], activation) < 1e-5, layer


@pytest.mark.parametrize(("name", "version"), [("resnet18", "1"), ("cifar_resnet20", "1"), ("cifar_resnet20", "2")])
def test_forward_in_train_mode(name, version):
    options = {"momentum": 0.7, "epsilon": 1e-2}
    model = create(name, num_classes=10, policy=FULL, version=version, **options)
    variables, images = _random_variables(model), _images((8, 32, 32, 3))
    forward = jax.jit(lambda v, x: model.apply(v, x, True, mutable=["batch_stats"]))
    logits, updates = forward(variables, images)
    expected = _reference(name, variables, version, train=True, **options)
    # Dividing by a batch's deviation amplifies rounding where it is small.
    assert _relative(logits, expected(images)) < 1e-4
    errors = jax.tree.map(_relative, updates["batch_stats"], expected.batch_stats)
    assert max(jax.tree.leaves(errors)) < 1e-4


def test_synchronised_statistics_make_devices_equal_to_one_batch():
    options = {"num_classes": 10, "policy": FULL, "version": "1"}
    variables = _random_variables(create("cifar_resnet8", **options))
    images = _images((8, 16, 16, 3)) + np.arange(8, dtype=np.float32)[:, None, None, None]
    synchronised = create("cifar_resnet8", axis_name="data", **options)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    over_data, everywhere = PartitionSpec("data"), PartitionSpec()
    forward = jax.jit(
        jax.shard_map(
            lambda v, x: synchronised.apply(v, x, True, mutable=["batch_stats"]),
            mesh=mesh,
            in_specs=(everywhere, over_data),
            out_specs=(over_data, everywhere),
        )
    )
    logits, updates = forward(variables, images)
    expected = reference.ResNet(variables, 8, "1", cifar=True, train=True)
    assert _relative(logits, expected(images)) < 1e-4
    errors = jax.tree.map(_relative, updates["batch_stats"], expected.batch_stats)
    assert max(jax.tree.leaves(errors)) < 1e-4


# --- the initial state


@functools.cache
def _initial(version, zero_init_last):
    """A fresh network of two blocks a stage: (model, images, variables)."""
    model = create(
        "cifar_resnet14",
        num_classes=10,
        policy=FULL,
        version=version,
        zero_init_last=zero_init_last,
    )
    images = _images((4, 16, 16, 3))
    return model, images, jax.jit(model.init)(_key(), images)


def _block_outputs(version, zero_init_last):
    """For every block of a fresh network: its output, and the last of its residual branch."""
    model, images, variables = _initial(version, zero_init_last)
    # Records what every module of the network returns.
    forward = jax.jit(lambda v, x: model.apply(v, x, capture_intermediates=True))
    _, state = forward(variables, images)
    last = "norm2" if version == "1" else "conv2"
    blocks = {name: layers for name, layers in state["intermediates"].items() if last in layers}
    assert sorted(blocks) == [f"block_layer{i}_{j}" for i in (1, 2, 3) for j in (1, 2)]
    return {name: (layers["__call__"][0], layers[last]["__call__"][0]) for name, layers in blocks.items()}


@pytest.mark.parametrize("version", ["1", "2"])
def test_blocks_start_as_the_identity_with_zero_init_last(version):
    outputs = _block_outputs(version, zero_init_last=True)
    for name, (_, branch) in outputs.items():
        np.testing.assert_array_equal(branch, 0, err_msg=name)
    for stage in (1, 2, 3):
        first, second = (outputs[f"block_layer{stage}_{index}"][0] for index in (1, 2))
        assert np.std(first) > 0.1
        # The second block of a stage has no projection.
        np.testing.assert_array_equal(second, first)


@pytest.mark.parametrize("version", ["1", "2"])
def test_blocks_do_not_start_as_the_identity_without_zero_init_last(version):
    outputs = _block_outputs(version, zero_init_last=False)
    for name, (_, branch) in outputs.items():
        assert np.std(branch) > 0.1, name


@pytest.mark.parametrize("version", ["1", "2"])
def test_every_residual_branch_can_leave_its_initial_zero(version):
    """A branch of which no parameter has a gradient never trains.

    A pre-activated branch whose last scale is 0 is one: its last ReLU sits at 0, where it passes
    no gradient back, and feeds zeros to the convolution after it.
    """
    model, images, variables = _initial(version, zero_init_last=True)
    weights = _images((4, 10), seed=5)

    def loss(params):
        logits, _ = model.apply({**variables, "params": params}, images, True, mutable=["batch_stats"])
        return (logits * weights).sum()

    grads = jax.jit(jax.grad(loss))(variables["params"])
    blocks = [name for name in grads if name.startswith("block_layer")]
    assert len(blocks) == 6
    for block in blocks:
        branch = [grads[block][name] for name in ("conv1", "norm2", "conv2")]
        assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(branch)) > 0, block


@pytest.mark.parametrize(
    ("kernel_init", "std"),
    [
        ("he_normal", lambda fan_in, fan_out: math.sqrt(2 / fan_in)),
        ("he_normal_fan_out", lambda fan_in, fan_out: math.sqrt(2 / fan_out)),
        ("lecun_normal", lambda fan_in, fan_out: math.sqrt(1 / fan_in)),
        ("glorot_uniform", lambda fan_in, fan_out: math.sqrt(2 / (fan_in + fan_out))),
    ],
)
def test_standard_deviation_of_the_initialisers(kernel_init, std):
    model = create("resnet50", num_classes=1000, policy=FULL, kernel_init=kernel_init)
    model = model.clone(stage_sizes=(1, 1, 1, 1), filters=32)
    params = jax.jit(model.init)(_key(), _images((1, 32, 32, 3)))["params"]
    convs = [
        # (kernel, fan in, fan out); the first two have more than twice as many outputs as inputs,
        # so that no two of the initialisers agree on them.
        (params["block_layer4_1"]["conv3"]["kernel"], 256, 1024),
        (params["stem_conv"]["kernel"], 49 * 3, 49 * 32),
        (params["block_layer4_1"]["conv2"]["kernel"], 9 * 256, 9 * 256),
    ]
    for kernel, fan_in, fan_out in convs:
        # The stem's 4704 values tell its deviation to 1 %.
        assert np.std(kernel) == pytest.approx(std(fan_in, fan_out), rel=0.04)
        assert abs(np.mean(kernel)) < 4 * np.std(kernel) / math.sqrt(kernel.size)
    # The head has an initialiser of its own: N(0, 0.01²), the v1.5 reference's.
    assert np.std(params["head"]["kernel"]) == pytest.approx(0.01, rel=0.01)
    np.testing.assert_array_equal(params["head"]["bias"], 0)


def test_initialisers_may_be_functions():
    constant = jax.nn.initializers.constant
    model = create("cifar_resnet8", num_classes=3, policy=FULL, kernel_init=constant(2), head_init=constant(3))
    params = jax.jit(model.init)(_key(), _images((1, 8, 8, 3)))["params"]
    for name in ("conv1", "conv2", "conv_proj"):
        np.testing.assert_array_equal(params["block_layer2_1"][name]["kernel"], 2)
    np.testing.assert_array_equal(params["stem_conv"]["kernel"], 2)
    np.testing.assert_array_equal(params["head"]["kernel"], 3)


def test_an_evaluation_in_bfloat16_is_finite_on_the_cpu():
    """jaxlib 0.11 and 0.12 made NaN of it, where the last stage and the mean were one fusion."""
    half = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
    networks = [create("resnet18", num_classes=7, policy=policy, head_init="glorot_uniform") for policy in (FULL, half)]
    images = jnp.asarray(_images((2, 160, 160, 3)))
    variables = jax.jit(networks[0].init)(_key(), images[:, :32, :32])
    expected, found = (jax.jit(network.apply)(variables, images) for network in networks)
    assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)
