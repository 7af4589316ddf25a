"""The networks against an independent float64 implementation, their sizes, their initial state."""

import math

import jax
import jmp
import numpy as np
import pytest

from mixedres import models
from mixedres._internal.tree import named_leaves
from mixedres.models import create
from tests.models import reference
from tests.models.networks import FULL, images, random_variables, relative, shapes_of, small


def _key():
    # XLA compiles this generator several times faster than the default one.
    return jax.random.key(0, impl="rbg")


# Stages and filters. arXiv 1512.03385, table 1 and section 4.2; 1603.05027 for 200.
NETWORKS = [("resnet18", None, "1.5", (2, 2, 2, 2), 64), ("resnet14", None, "1.5", (1, 1, 1, 1), 64)]
NETWORKS += [("resnet26", None, "1.5", (2, 2, 2, 2), 64), ("resnet34", "2", "2", (3, 4, 6, 3), 64)]
NETWORKS += [("resnet50", None, "1.5", (3, 4, 6, 3), 64), ("resnet101", "1", "1", (3, 4, 23, 3), 64)]
NETWORKS += [("resnet152", "1.5", "1.5", (3, 8, 36, 3), 64), ("resnet200", "2", "2", (3, 24, 36, 3), 64)]
NETWORKS += [("cifar_resnet20", None, "1", (3, 3, 3), 16), ("cifar_resnet110", "2", "2", (18, 18, 18), 16)]


@pytest.mark.parametrize(("name", "version", "resolved", "stage_sizes", "filters"), NETWORKS)
def test_names_and_versions(name, version, resolved, stage_sizes, filters):
    model = create(name, num_classes=np.int64(10), policy=FULL, version=version)
    assert model.version == resolved and tuple(model.stage_sizes) == stage_sizes and model.filters == filters


TENSORFLOW = {"padding": "tensorflow", "pool_padding": "tensorflow", "projection": "stage"}
FORWARD = [
    # (name, version, image shape, options): every kind of block, both paddings; one is of odd size.
    ("resnet50", "1", (2, 37, 32, 3), {}),
    ("resnet50", "2", (2, 32, 48, 3), {}),
    ("resnet18", "1", (2, 34, 32, 3), TENSORFLOW),
    ("cifar_resnet20", "2", (2, 16, 12, 3), TENSORFLOW),
]


@pytest.mark.parametrize(("name", "version", "shape", "options"), FORWARD)
def test_forward_in_eval_mode(name, version, shape, options):
    model = small(name, version, epsilon=1e-3, **options)
    variables, x = random_variables(model), images(shape)
    logits, state = jax.jit(lambda v, x: model.apply(v, x, mutable=["intermediates"]))(variables, x)
    expected = reference.ResNet(model, variables)
    # Fifty layers of float32 rounding, 1e-6 as measured; reduced-precision products would give 1e-3.
    assert relative(logits, expected(x)) < 1e-5 and set(state["intermediates"]) == set(expected.activations)
    for layer, activation in expected.activations.items():
        assert np.isfinite(activation).all()
        assert relative(state["intermediates"][layer][0], activation) < 1e-5, layer


def test_projections_of_every_stage():
    """The original's ResNet of CIFAR has 16 * 16 + 2 * 16 parameters more than ours, of which version 2 has no norm."""
    for version, norms in (("1", 2), ("2", 0)):
        shapes = [shapes_of(small("cifar_resnet20", version, projection=p))["params"] for p in ("shape", "stage")]
        before, after = (sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) for params in shapes)
        width = shapes[0]["stem_conv"]["kernel"].shape[-1]
        assert after - before == width * (width + norms)
    bottlenecks = [shapes_of(small("resnet50", "1.5", projection=p)) for p in ("shape", "stage")]
    assert bottlenecks[0] == bottlenecks[1]


@pytest.mark.parametrize(
    ("name", "version", "options", "fused"),
    [
        ("cifar_resnet20", "2", {}, False),
        ("resnet50", "1.5", TENSORFLOW, True),
        pytest.param("resnet18", "1", TENSORFLOW, False, marks=pytest.mark.slow),
        pytest.param("resnet18", "1", TENSORFLOW, True, marks=pytest.mark.slow),
        pytest.param("cifar_resnet20", "2", {}, True, marks=pytest.mark.slow),
        pytest.param("resnet50", "2", {}, True, marks=pytest.mark.slow),
        pytest.param("cifar_resnet20", "1", {}, False, marks=pytest.mark.slow),
    ],
)
def test_forward_in_train_mode(name, version, options, fused):
    model = small(name, version, momentum=0.7, epsilon=1e-2, fused=fused, **options)
    variables, x = random_variables(model), images((8, 32, 32, 3))
    logits, updates = jax.jit(lambda v, x: model.apply(v, x, True, mutable=["batch_stats"]))(variables, x)
    expected = reference.ResNet(model, variables, train=True)
    # Dividing by a batch's deviation amplifies rounding where it is small.
    assert relative(logits, expected(x)) < 1e-4
    assert max(jax.tree.leaves(jax.tree.map(relative, updates["batch_stats"], expected.batch_stats))) < 1e-4


@pytest.mark.parametrize(("version", "last"), [pytest.param("1", "norm2", marks=pytest.mark.slow), ("2", "conv2")])
def test_residual_branches_start_as_zero_and_have_gradients(version, last):
    """A branch of which no parameter has a gradient never trains.

    A pre-activated branch whose last scale is 0 is one: its last ReLU sits at 0, where it passes no gradient back, and
    feeds zeros to the convolution after it.
    """
    model, x = small("cifar_resnet8", version, stage_sizes=(2,)), images((4, 8, 8, 3))
    weights = images((4, 10), seed=5)

    def loss(params, others):
        # Records what every module of the network returns.
        logits, state = model.apply({**others, "params": params}, x, True, mutable=True, capture_intermediates=True)
        return (logits * weights).sum(), state["intermediates"]

    def start():
        variables = model.init(_key(), x)
        return jax.grad(loss, has_aux=True)(variables["params"], variables)

    grads, state = jax.jit(start)()
    blocks = {name: layers for name, layers in state.items() if last in layers}
    assert sorted(blocks) == ["block_layer1_1", "block_layer1_2"]
    for block, layers in blocks.items():
        np.testing.assert_array_equal(layers[last]["__call__"][0], 0, err_msg=block)
        branch = [grads[block][name] for name in ("conv1", "norm2", "conv2")]
        assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(branch)) > 0, block
    first, second = (layers["__call__"][0] for layers in blocks.values())
    assert np.std(first) > 0.1
    np.testing.assert_array_equal(second, first)  # they have no projection


INITIALIZERS = {
    "he_normal": lambda fan_in, fan_out: math.sqrt(2 / fan_in),
    "he_normal_fan_out": lambda fan_in, fan_out: math.sqrt(2 / fan_out),
    "lecun_normal": lambda fan_in, fan_out: math.sqrt(1 / fan_in),
    "glorot_uniform": lambda fan_in, fan_out: math.sqrt(2 / (fan_in + fan_out)),
    "normal_0.01": lambda fan_in, fan_out: 0.01,
}


def test_standard_deviation_of_the_initializers():
    assert models.INITIALIZERS.keys() == INITIALIZERS.keys()
    for name, std in INITIALIZERS.items():
        # Four times as many outputs as inputs, so that no two of the initializers agree.
        kernel = np.asarray(models.INITIALIZERS[name](_key(), (3, 3, 16, 64)))
        # 9216 values tell their deviation to 1 %.
        assert np.std(kernel) == pytest.approx(std(9 * 16, 9 * 64), rel=0.04)
        assert abs(np.mean(kernel)) < 4 * np.std(kernel) / math.sqrt(kernel.size)
    # The head has an initializer of its own: N(0, 0.01²), the v1.5 reference's.
    model = create("resnet50", num_classes=10, policy=FULL)
    assert (model.kernel_init, model.head_init) == tuple(models.INITIALIZERS[n] for n in ("he_normal", "normal_0.01"))


@pytest.mark.parametrize(("version", "last"), [("1", "norm2/scale"), ("2", "conv2/kernel")])
@pytest.mark.parametrize("zero_init_last", [True, False])
def test_initializers_may_be_functions(version, last, zero_init_last):
    """And zero_init_last sets one array of a block to zero."""
    constant = jax.nn.initializers.constant
    options = {"kernel_init": constant(2), "head_init": constant(3), "zero_init_last": zero_init_last}
    model = small("cifar_resnet8", version, stage_sizes=(1,), projection="stage", **options)
    for path, leaf in named_leaves(jax.jit(model.init)(_key(), images((1, 8, 8, 3)))["params"]).items():
        expected = 3 if path == "head/kernel" else {"kernel": 2, "scale": 1, "bias": 0}[path.rpartition("/")[2]]
        is_zero = zero_init_last and path == f"block_layer1_1/{last}"
        np.testing.assert_array_equal(leaf, 0 if is_zero else expected, err_msg=path)


@pytest.mark.slow
def test_evaluation_in_bfloat16_is_finite_on_the_cpu():
    """jaxlib 0.11 and 0.12 made NaN of it, where the last stage and the mean were one fusion."""
    half = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
    networks = [create("resnet18", num_classes=7, policy=policy, head_init="glorot_uniform") for policy in (FULL, half)]
    x = images((2, 160, 160, 3))
    variables = jax.jit(networks[0].init)(_key(), x[:, :32, :32])
    expected, found = (jax.jit(network.apply)(variables, x) for network in networks)
    assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)
