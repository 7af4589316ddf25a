"""`first_nonfinite` on small functions: its statistics against numpy, and which operation it blames."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mixedres.numerics import first_nonfinite
from tests.arrays import full, ones, zeros

F16 = jnp.float16


def find(finding, path="", primitive="", direction="forward"):
    """The one row of an operation."""
    rows = [r for r in finding.arrays if r.path == path and r.primitive == primitive and r.direction == direction]
    assert len(rows) == 1, rows
    return rows[0]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_statistics_agree_with_numpy(dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(100 * rng.normal(size=(5, 7)), dtype).at[2, 3].set(-jnp.inf).at[4, 4].set(jnp.nan)
    w = jnp.asarray(rng.normal(size=(7, 3)), dtype)

    def fn(x, w):
        with jax.named_scope("product"):
            y = jnp.where(jnp.isfinite(x), x, 0) @ w
        with jax.named_scope("after"):
            return jnp.tanh(y)

    finding = first_nonfinite(fn, x, w, names=("x", "w"))
    wide = np.asarray(x, np.float64)
    product = np.asarray(jnp.where(jnp.isfinite(x), x, 0) @ w, np.float64)
    argument, result = find(finding, "x"), find(finding, "product", "dot_general")
    assert not argument.finite and argument.largest == np.abs(wide[np.isfinite(wide)]).max()
    assert result.finite and result.shape == (5, 3) and result.dtype == dtype
    np.testing.assert_allclose(result.largest, np.abs(product).max(), rtol=2 * float(jnp.finfo(dtype).eps))
    assert find(finding, "after", "tanh").largest <= 1 and str(finding) == "all results are finite"
    assert finding.origin is None and finding.nonfinite_results == ()  # what is not finite reaches no result


def test_first_of_two_overflows_is_blamed():
    def fn(x):
        with jax.named_scope("fine"):
            y = x * 2
        with jax.named_scope("first"):
            a = y * 1000
        with jax.named_scope("second"):
            b = y * 2000
        with jax.named_scope("later"):
            return {"b": b - 1, "a": a + 1, "y": y}

    finding = first_nonfinite(fn, jnp.asarray([1.0, -300.0], F16))
    origin = finding.origin
    assert (origin.array.path, origin.array.primitive, origin.array.largest) == ("first", "mul", 2000.0)
    assert [(row.path, row.largest) for row in origin.inputs] == [("fine", 600.0)]
    assert finding.nonfinite_results == ("a", "b") and (origin.devices, origin.iterations) == ((), ())
    words = "first, forward: mul, float16[2], at "
    assert words in str(finding) and "; results that are not finite: a, b. Try keep_float32='^/first(/|$)'" in str(
        finding
    )
    assert first_nonfinite(lambda x: x * x, F16(1e4)).origin.advice.startswith("Wrap the operation, and what reads it")


def test_unused_infinity_is_not_blamed():
    def fn(x):
        padded = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2,), (1,), ((1, 0),))  # its padding is -inf
        masked = jnp.where(x > 0, jnp.log(x), 0.0)  # log 0 is
        with jax.named_scope("culprit"):
            return jnp.sqrt(padded + masked - 10)

    finding = first_nonfinite(fn, jnp.asarray([0.0, 1.0, 2.0]))
    assert finding.origin.array.path == "culprit" and finding.origin.array.primitive == "sqrt"
    assert any(row.primitive == "log" and not row.finite for row in finding.arrays)


@pytest.mark.parametrize(
    ("fn", "primitive"),
    [
        (lambda x: ones(3, F16) / (x + F16(6e4)), "div"),  # 1 / inf
        (lambda x: jax.lax.rsqrt(x * x), "rsqrt"),
        (lambda x: jnp.tanh(x * x) + jnp.exp(-x * x) + jnp.minimum(jnp.exp(x), 1), ""),  # right for an infinite operand
        (lambda x: jax.nn.softmax(jnp.where(x > 2, -jnp.inf, jnp.arange(3, dtype=F16))), ""),
        (lambda x: jax.lax.reduce_window(x, F16(-jnp.inf), jax.lax.max, (2,), (1,), ((1, 0),)), ""),
        (lambda x: jax.lax.scan(lambda c, x: (c + 1 / (x * x), c), F16(0), x), "div"),
    ],
)
def test_hidden_infinity_is_named(fn, primitive):
    finding = first_nonfinite(fn, jnp.asarray([3e4, 1.0, 2.0], F16))
    assert finding.origin is None and {by.primitive for _, by in finding.hidden} == {primitive} - {""}
    assert str(finding).startswith("all results are finite") and ("hidden by: div at " in str(finding)) == (
        primitive == "div"
    )


def test_factor_of_a_derivative_is_backward():
    """The derivative of a norm at 0 divides in the forward pass, at a line without a division."""
    origin = first_nonfinite(jax.grad(lambda x: 2 * jnp.linalg.norm(x)), zeros(3)).origin
    assert origin.array.primitive == "div" and origin.array.direction.startswith("backward (a factor")
    assert "backward (a factor of the derivative, computed in the forward pass): div" in str(origin)
    origin = first_nonfinite(jax.grad(lambda x: jnp.sqrt(jnp.exp(x)).sum()), full(3, 100.0)).origin
    assert (origin.array.primitive, origin.array.direction) == ("exp", "forward")


def test_direction_is_known_inside_checkpoint_and_custom_rules():
    @jax.custom_vjp
    def steep(x):
        return x

    steep.defvjp(lambda x: (x, None), lambda _, g: (jax.named_scope("rule")(lambda g: g * F16(3e4))(g),))

    def fn(x):
        with jax.named_scope("outer"):
            return jax.checkpoint(lambda x: jnp.sin(steep(jnp.tanh(x))))(x).sum()

    finding = first_nonfinite(jax.value_and_grad(fn), full(3, 0.1, F16))
    assert finding.origin is None
    finding = first_nonfinite(jax.grad(lambda x: 8 * fn(x)), full(3, 0.1, F16))
    assert finding.origin.array.direction == "backward" and finding.origin.array.primitive == "mul"
    assert finding.origin.array.path.startswith("outer") and finding.origin.array.path.endswith("rule")
    assert finding.origin.inputs[0].largest < 9


@pytest.mark.parametrize("reverse", [False, True])
def test_iteration_of_a_scan_is_named(reverse):
    def body(carry, x):
        with jax.named_scope("grow"):
            carry = carry * x
        return carry, jnp.sin(carry)

    # 10, 100, ..., and the fifth product is 1e6; in reverse the third is, at position 3 of 6.
    x = jnp.asarray([10, 10, 10, 10, 10, 10] if not reverse else [1, 1, 1, 200, 200, 10], F16)
    finding = first_nonfinite(lambda x: jax.lax.scan(body, F16(10), x, reverse=reverse), x)
    origin = finding.origin
    assert ", in iteration 3; results that are not finite: 0, 1. " in str(finding)
    assert (origin.array.path, origin.array.primitive) == ("grow", "mul") and origin.iterations == (3,)
    assert [row.largest for row in origin.inputs] == ([10000.0, 10.0] if not reverse else [20000.0, 200.0])


def test_nested_scans_and_an_infinite_slice():
    def fn(x):
        def outer(carry, rows):
            return jax.lax.scan(lambda carry, part: (carry + part, None), carry, rows)[0], None

        return jax.lax.scan(outer, jnp.float32(0), x)[0]

    x = np.ones((3, 4), np.float32)
    assert first_nonfinite(fn, x).origin is None
    x[1, 2] = np.inf
    origin = first_nonfinite(fn, x, names=("x",)).origin
    assert origin.is_argument and origin.array.path == "x" and origin.array.largest == 1
    assert origin.advice == "x was not finite when the function began: for weights, give those of the step before"
    x[1, 2] = 3.4e38
    x[2, 1] = 1e38
    finding = first_nonfinite(fn, x, names=("x",))
    assert finding.origin.array.primitive == "add" and finding.origin.iterations == (2, 1)
    assert ", in iteration 2, 1; the result is not finite. Change its operands, " in str(finding)


@pytest.mark.parametrize("checked", [True, False])
def test_device_is_blamed_and_the_all_reduce_is_not(checked):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def fraction(w, x):
        def body(total, row):
            with jax.named_scope("work"):
                return total + jnp.exp(row) * w, None

        zero = jax.lax.pcast(jnp.float32(0), "data", to="varying") if checked else jnp.float32(0)
        return jax.lax.psum(jax.lax.scan(body, zero, x)[0], "data")

    fn = jax.jit(jax.shard_map(fraction, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=checked))
    x = np.zeros(24, np.float32)
    x[[5, 20]] = 100.0  # on device 1 in the third iteration, on device 6 in the third
    origin = first_nonfinite(fn, jnp.float32(1), x).origin
    assert (origin.array.path, origin.array.primitive) == ("work", "exp")
    assert origin.devices == (1, 6) and origin.iterations == (2,)
    assert origin.array.shape == () and origin.array.largest == 1


def test_equal_layers_are_told_apart_by_number_and_caller():
    """As those of an NNX module, which opens no scopes."""

    def layer(x, w):
        return jax.nn.relu(x @ w) * F16(2)

    def network(x, weights):
        for w in weights:
            x = layer(x, w)
        return x

    weights = [full((2, 2), w, F16) for w in (1, 10, 1000, 10, 1)]
    finding = first_nonfinite(network, ones((1, 2), F16), weights)
    assert finding.origin.repeat == (3, 5) and finding.origin.array.primitive == "dot_general"
    here, first = __file__, network.__code__.co_firstlineno
    assert f"number 3 of 5 from this line, which {here}:{first + 2} (" in str(finding) and "network) calls" in str(
        finding
    )


def test_gradient_beyond_float16_advises_a_smaller_scale():
    origin = first_nonfinite(jax.grad(lambda x: (x.astype(jnp.float32) * 1e5).sum()), ones((2,), F16)).origin
    assert (origin.array.direction, origin.advice) == ("backward", "Try a smaller loss scale")


def test_arguments_except_arrays_pass_unchanged():
    """As the layers of an Equinox module, which has functions among its leaves."""

    def network(layers, x):
        for weight, activation in layers:
            x = activation(x @ weight)
        return x

    layers = [(ones((4, 4)), jnp.tanh), (full((4, 4), 2.0), jnp.log)]
    finding = first_nonfinite(network, layers, -ones((2, 4)), names=("model", "x"))
    assert finding.origin.array.primitive == "log" and finding.arrays[0].path == "model/0/0"
    for text in (str(finding), str(finding.origin)):
        assert "log, float32[2,4]" in text and f"{__file__}:" in text and len(text.splitlines()) == 1


def test_variables_of_an_nnx_module_have_paths():
    nnx = pytest.importorskip("flax.nnx")
    module = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    module.scale[...] = module.scale[...].at[1].set(jnp.inf)
    finding = first_nonfinite(lambda m, x: m(x), module, jnp.arange(12.0).reshape(4, 3), names=("norm", "x"))
    assert finding.origin.is_argument and finding.origin.array.path == "norm/scale"
    assert not module.mean[...].any()


def test_numbers_of_python_are_passed_unchanged():
    def fn(x, rows, is_logged):  # a size and a switch
        return jnp.log(x.reshape(rows, -1) - 1.0) if is_logged else x

    assert first_nonfinite(fn, ones((4,)), 2, False).origin is None
    assert first_nonfinite(fn, ones((4,)), 2, True).origin.array.primitive == "log"


def test_operations_of_jax_have_the_line_of_the_call():
    def fn(x):
        return jnp.linalg.norm(x)  # traced once for all its callers: no frame of the product in it is of this file

    origin = first_nonfinite(fn, full((2, 2), 300, F16)).origin
    assert (origin.array.path, origin.array.primitive, origin.inputs[0].largest) == ("", "mul", 300)
    assert f"{__file__}:{fn.__code__.co_firstlineno + 1} " in origin.array.source


def test_constant_result_that_is_not_finite_is_named():
    found = first_nonfinite(lambda x: {"loss": jnp.full(3, jnp.nan), "y": x}, ones((3,)))
    assert found.nonfinite_results == ("loss",) and found.origin is None
    assert str(found) == "constants of the program are results that are not finite: loss"
    assert first_nonfinite(lambda x: (float("nan"), x), ones((3,))).nonfinite_results == ("0",)
