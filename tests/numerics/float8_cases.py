"""A network to judge in float8, its real float8 operands, and the errors of its real float8 gradients."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from mixedres import numerics
from mixedres.autocast import Float8, autocast
from mixedres.autocast.evaluation import float8_product

# All sizes of arrays differ: (layer, width of its input); then the width of the last result.
BATCH, WIDTHS = 331, (64, 96, 80, 112, 48)
LAYERS = ("first", "second", "third", "fourth")


def network(outlier: float = 0.0):
    """loss(params, x) of dense layers with a skip; `outlier` is one element of what 'third' reads, 0 for none.

    Such an element sets the scale of the whole tensor, though it touches only the first example.
    """

    def loss(params, x):
        x = numerics.tap(x, "images")
        for index, name in enumerate(LAYERS):
            with jax.named_scope(name):
                y = numerics.tap(x @ params[name], f"{name}/result")
            x = jnp.tanh(y) if index < 3 else y
            if name == "second" and outlier:
                x = x.at[0, 0].set(outlier)
            x = numerics.tap(x, f"{name}/out")
        return jnp.mean(x**2)

    return loss


def arrays():
    """(params, x), float32."""
    rng = np.random.default_rng(0)
    pairs = zip(LAYERS, WIDTHS[:-1], WIDTHS[1:], strict=True)
    params = {name: rng.standard_normal((m, n)).astype(np.float32) / np.sqrt(m) for name, m, n in pairs}
    return params, rng.standard_normal((BATCH, WIDTHS[0])).astype(np.float32)


def examined(outlier: float = 0.0):
    """The report on `network`."""
    return numerics.examine(network(outlier), *arrays(), formats=("fp8",))


def gradients(loss, *args):
    """The gradients of a loss, without the warning that this device has no float8."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return jax.device_get(jax.jit(jax.grad(loss))(*args))


def errors(outlier: float, keep_bfloat16: str = "", dtype: str = "float8"):
    """{layer: relative l2 error of the real weight gradient in float8, or in bfloat16} of `network`."""
    loss = network(outlier)
    exact = gradients(loss, *arrays())
    precision = Float8(min_size=0, keep_bfloat16=keep_bfloat16) if dtype == "float8" else jnp.bfloat16
    found = gradients(autocast(loss, precision), *arrays())
    return {name: float(np.linalg.norm(found[name] - exact[name]) / np.linalg.norm(exact[name])) for name in LAYERS}


def real_operands(monkeypatch, loss, *args):
    """{(format, size): (fraction of the mass lost, of the nonzero elements that become zero, l2 error)} of `loss`.

    Of what autocast really casts to float8 in the gradient of `loss`; arrays of one format and size count as one.
    """
    found = {}
    plain = float8_product.quantize

    def record(format, x, cast, log2_scale):
        exact, cast = np.abs(np.float64(x)) * 2.0**log2_scale, np.abs(np.float64(cast))
        lost, nonzero = cast == 0, np.count_nonzero(exact)
        error = np.linalg.norm(exact - cast) / np.linalg.norm(exact)
        found[format, exact.size] = (
            float(exact[lost].sum() / exact.sum()),
            np.count_nonzero(exact[lost]) / nonzero,
            float(error),
        )

    def quantize(x, format):
        result = plain(x, format)
        jax.debug.callback(functools.partial(record, format), x, result.array, result.log2_scale)
        return result

    monkeypatch.setattr(float8_product, "quantize", quantize)
    gradients(autocast(loss, Float8(min_size=0)), *args)
    jax.effects_barrier()
    return found
