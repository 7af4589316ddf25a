"""What `autocast` refuses or warns of, with which words, and the errors of the function itself."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

from mixedres.amp import PrecisionWarning, autocast, explain
from tests.amp.graphs import product_dtypes
from tests.arrays import normal

X = normal(0, (4, 4))
W = normal(1, (4, 4))
Pair = collections.namedtuple("Pair", "first second")


NOT_HALF = {jnp.float32: "float32", "float64": "float64", np.int8: "int8", "nonsense": "'nonsense'"}
NOT_HALF |= {dtype: ".*; qwix .*float8$" for dtype in ("fp8", "FP8", "e4m3", "float8_e5m2", jnp.float8_e4m3fn)}


@pytest.mark.parametrize("dtype", NOT_HALF)
def test_dtypes_except_half_are_refused(dtype):
    for make in (autocast, explain):
        with pytest.raises(ValueError, match=f"dtype must be float16 or bfloat16, got {NOT_HALF[dtype]}"):
            make(jnp.matmul, dtype)


@pytest.mark.parametrize("fn", [None, "matmul", X])
def test_non_function_is_refused(fn):
    for make in (autocast, explain):
        with pytest.raises(TypeError, match="autocast takes a function, got"):
            make(fn)


@pytest.mark.parametrize(
    ("result", "place"),
    [("text", "str;"), ({"aux": ["text"]}, r"str at \['aux'\]\[0\];"), (Pair(X, object), r"type at \.second;")],
)
def test_non_array_result_is_named(result, place):
    for make in (autocast, explain):
        with pytest.raises(TypeError, match=f"returns a {place} .* returns arrays only"):
            make(lambda x: result)(X)


def test_exception_of_the_function_passes_unchanged():
    error = KeyError("mine", 3)

    def failing(x):
        raise error

    for rewritten in (autocast(failing), jax.jit(autocast(failing)), explain(failing), autocast(jax.jit(failing))):
        with pytest.raises(KeyError) as caught:
            rewritten(X)
        assert caught.value is error and caught.value.args == ("mine", 3)


def test_precision_highest_warns_and_casts_nothing():
    fn = autocast(lambda x: jnp.tanh(x @ W) @ W)
    with jax.default_matmul_precision("highest"):
        with pytest.warns(PrecisionWarning, match="casts nothing: all 2 products ask for float32") as caught:
            got = fn(X)
        assert caught[0].filename == __file__
        np.testing.assert_array_equal(got, fn.__wrapped__(X))
        report = explain(fn.__wrapped__)(X)
    assert (report.casts_down, report.casts_up, product_dtypes(report.jaxpr)) == (0, 0, {"f32"})
    (note,) = report.notes
    assert note.startswith("2 of 2 operations of the allow list are not cast: precision=")
    assert "is jax_default_matmul_precision set?" in note


@pytest.mark.filterwarnings("ignore:.*bcoo_dot_general:UserWarning")
def test_sparse_products_warn_and_stay_float32():
    matrix = sparse.BCOO.fromdense(normal(0, (4, 4)) * (normal(1, (4, 4)) > 0))
    with pytest.warns(PrecisionWarning, match="casts nothing: all 1 products are of sparse matrices"):
        got = autocast(lambda matrix, x: matrix @ x)(matrix, X)
    np.testing.assert_array_equal(got, matrix @ X)
    report = explain(sparse.sparsify(lambda matrix, x: jnp.sin(matrix @ x)))(matrix, X)
    assert report.decisions[0].reason == "a product of a sparse matrix: float32"
    assert "1 products of sparse matrices are not cast" in report.notes
