"""What the traced networks compute in which dtype, with which strides, padding and precision."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import jmp
import pytest

from mixedres._internal.jax_compat import equations as all_equations
from mixedres.models import create
from tests.models.networks import small

POLICIES = {
    dtype: jmp.get_policy(f"params=float32,compute={dtype},output=float32")
    for dtype in ("float32", "bfloat16", "float16")
}
# Two stages, of one block and of two, of the widths of the whole network.
NETWORKS = [
    ("resnet50", "1"),
    ("resnet50", "1.5"),
    ("resnet50", "2"),
    ("cifar_resnet20", "1"),
    ("cifar_resnet20", "2"),
]
BATCH, CLASSES = 2, 1001
# For images of 224x224: the table of the original's imagenet_test.py; and for the CIFAR stem.
IMAGENET_SHAPES = {
    "initial_conv": (BATCH, 112, 112, 64),
    "initial_max_pool": (BATCH, 56, 56, 64),
    "block_layer1": (BATCH, 56, 56, 256),
    "block_layer2": (BATCH, 28, 28, 512),
    "block_layer3": (BATCH, 14, 14, 1024),
    "block_layer4": (BATCH, 7, 7, 2048),
    "final_reduce_mean": (BATCH, 2048),
    "final_dense": (BATCH, CLASSES),
}
CIFAR_SHAPES = {
    "initial_conv": (BATCH, 224, 224, 16),
    "block_layer1": (BATCH, 224, 224, 16),
    "block_layer2": (BATCH, 112, 112, 32),
    "block_layer3": (BATCH, 56, 56, 64),
    "final_reduce_mean": (BATCH, 64),
    "final_dense": (BATCH, CLASSES),
}


# A ResNet-50 of one block in the first stage and two in the second: a stem, 3 convolutions a block, 2 projections.
BLOCKS, CONVS = (1, 2), 1 + 3 * 3 + 2


def _model(name, version, dtype, **options):
    return small(name, version, POLICIES[dtype], filters=16 if "cifar" in name else 64, num_classes=CLASSES, **options)


def _traced(model, size=224):
    """(shapes of the variables, shape of the images)."""
    images = jax.ShapeDtypeStruct((BATCH, size, size, 3), jnp.float32)
    return jax.eval_shape(model.init, jax.random.key(0), images), images


def _forward_equations(model, train=False):
    variables, images = _traced(model)
    mutable = ["batch_stats"] if train else []
    jaxpr = jax.make_jaxpr(lambda v, x: model.apply(v, x, train, mutable=mutable))(variables, images)
    return list(all_equations(jaxpr))


@functools.cache
def _train_equations(version, dtype, precision=None):
    """The equations of the forward pass of a ResNet-50 and of the gradient of every parameter."""
    model = _model("resnet50", version, dtype, precision=precision)
    variables, images = _traced(model)

    def loss(params, batch_stats, images):
        logits, updates = model.apply(
            {"params": params, "batch_stats": batch_stats}, images, True, mutable=["batch_stats"]
        )
        return jnp.square(logits).sum(), updates

    grad = jax.make_jaxpr(jax.grad(loss, has_aux=True))
    return list(all_equations(grad(variables["params"], variables["batch_stats"], images)))


def _named(equations, *names):
    return [equation for equation in equations if equation.primitive.name in names]


def _dtypes(variables):
    return {variable.aval.dtype for variable in variables}


# --- dtypes


# Every network in float16 in training and in bfloat16 in evaluation, one in float32.
@pytest.mark.parametrize(
    ("name", "version", "dtype", "train"),
    [
        *((*network, "float16", True) for network in NETWORKS),
        *((*network, "bfloat16", False) for network in NETWORKS),
        (*NETWORKS[1], "float32", True),
    ],
)
def test_activations_have_the_compute_dtype_and_what_is_stored_is_float32(name, version, dtype, train):
    stages = 3 if "cifar" in name else 4
    model = _model(name, version, dtype, stage_sizes=(1,) * stages)
    variables, images = _traced(model)
    mutable = ["intermediates", "batch_stats"] if train else ["intermediates"]
    logits, state = jax.eval_shape(lambda v, x: model.apply(v, x, train, mutable=mutable), variables, images)
    shapes = CIFAR_SHAPES if name.startswith("cifar") else IMAGENET_SHAPES
    assert {name: [leaf.shape for leaf in leaves] for name, leaves in state["intermediates"].items()} == {
        name: [shape] for name, shape in shapes.items()
    }
    assert {leaf.dtype for leaf in jax.tree.leaves(state["intermediates"])} == {jnp.dtype(dtype)}
    assert logits.dtype == jnp.float32
    assert set(variables) == {"params", "batch_stats"}
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype("float32")}
    if train:
        assert jax.tree.map(jnp.result_type, state["batch_stats"]) == jax.tree.map(
            jnp.result_type, variables["batch_stats"]
        )


def test_output_dtype_of_the_policy_is_that_of_the_logits():
    policy = jmp.get_policy("params=float32,compute=float16,output=bfloat16")
    model = create("cifar_resnet8", num_classes=CLASSES, policy=policy)
    logits = jax.eval_shape(model.apply, *_traced(model))
    assert (logits.shape, logits.dtype) == ((BATCH, CLASSES), jnp.bfloat16)


# Half-precision corners: the arithmetic of the two versions differs, that of the two dtypes only in its name.
HALF = pytest.mark.parametrize(("version", "dtype", "norms"), [("1.5", "float16", CONVS), ("2", "bfloat16", CONVS - 2)])


@HALF
def test_every_product_forward_and_backward_has_operands_of_the_compute_dtype(version, dtype, norms):
    equations = _train_equations(version, dtype)
    convs, dots = _named(equations, "conv_general_dilated"), _named(equations, "dot_general")
    # The convolutions, a gradient of each kernel, and of each input but the images.
    assert (len(convs), len(dots)) == (3 * CONVS - 1, 3)
    for equation in convs + dots:
        assert _dtypes(equation.invars) == {jnp.dtype(dtype)}
        assert _dtypes(equation.outvars) == {jnp.dtype(dtype)}


@HALF
def test_sums_over_examples_and_pixels_are_float32(version, dtype, norms):
    equations = _train_equations(version, dtype)
    sums = [
        equation
        for equation in _named(equations, "reduce_sum")
        if equation.invars[0].aval.ndim == 4 and {0, 1, 2} <= set(equation.params["axes"])
    ]
    # Forward two moments for each norm; backward at least the gradients of scale and bias.
    assert len(sums) >= 4 * norms
    assert _dtypes(equation.invars[0] for equation in sums) == {jnp.dtype("float32")}
    squares = [equation for equation in _named(equations, "square", "integer_pow") if equation.invars[0].aval.ndim == 4]
    assert len(squares) == norms
    assert _dtypes(equation.invars[0] for equation in squares) == {jnp.dtype("float32")}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_norm_policy_reaches_every_norm(dtype):
    norm_policy = jmp.get_policy(f"params=float32,compute={dtype},output=float16")
    equations = _forward_equations(_model("resnet50", "1.5", "float16", norm_policy=norm_policy), train=True)
    # Evidence of the arithmetic: one (x - mean) in every norm.
    differences = [eqn for eqn in _named(equations, "sub") if eqn.outvars[0].aval.ndim == 4]
    assert Counter(eqn.outvars[0].aval.dtype.name for eqn in differences) == {dtype: CONVS}
    # The statistics do not follow it.
    roots = _named(equations, "rsqrt")
    assert Counter(eqn.outvars[0].aval.dtype.name for eqn in roots) == {"float32": CONVS}


# --- strides and padding


def _resnet50_convs(version):
    """(kernel size, stride) of every convolution of `_model`, a block's projection after its other ones."""
    convs = [(7, 2)]
    for stage, blocks in enumerate(BLOCKS, start=1):
        for index in range(blocks):
            stride = 2 if stage > 1 and index == 0 else 1
            first, second = (stride, 1) if version == "1" else (1, stride)
            convs += [(1, first), (3, second), (1, 1)]
            if index == 0:
                convs.append((1, stride))
    return convs


@pytest.mark.parametrize("version", ["1", "1.5", "2"])
def test_where_the_strides_of_resnet50_are(version):
    """On the first 1x1 of a stage in v1, on its 3x3 in v1.5 and v2; and on the projection."""
    equations = _forward_equations(_model("resnet50", version, "float32"))
    convs = []
    for equation in _named(equations, "conv_general_dilated"):
        height, width = equation.invars[1].aval.shape[:2]
        stride, stride_width = equation.params["window_strides"]
        assert (height, stride) == (width, stride_width)
        convs.append((height, stride))
    assert convs == _resnet50_convs(version)


@pytest.mark.parametrize(("name", "version"), NETWORKS)
def test_padding_is_symmetric(name, version):
    """What published weights expect: 'SAME' would pad a stride of 2 by 0 before and 1 after."""
    equations = _forward_equations(_model(name, version, "float32"))
    convs = _named(equations, "conv_general_dilated")
    assert len(convs) == {"resnet50": CONVS, "cifar_resnet20": 1 + 2 * 2 + 1}[name]
    for equation in convs:
        size = equation.invars[1].aval.shape[0]
        assert equation.params["padding"] == ((size // 2, size // 2),) * 2
    pools = _named(equations, "reduce_window_max")
    assert len(pools) == (name == "resnet50")
    for equation in pools:
        assert equation.params["window_dimensions"] == (1, 3, 3, 1)
        assert equation.params["window_strides"] == (1, 2, 2, 1)
        assert equation.params["padding"] == ((0, 0), (1, 1), (1, 1), (0, 0))


# --- precision of float32 products


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("highest", (jax.lax.Precision.HIGHEST,) * 2),
        ("tensorfloat32", (jax.lax.Precision.HIGH,) * 2),
        (None, None),
    ],
)
def test_precision_reaches_every_product_forward_and_backward(precision, expected):
    equations = _train_equations("1.5", "float32", precision)
    products = _named(equations, "conv_general_dilated", "dot_general")
    assert len(products) == 3 * CONVS - 1 + 3
    assert {equation.params["precision"] for equation in products} == {expected}
