"""numpyro: ELBOs a datum; by hand, the products are cast to half and distributions stay float32."""

import jax
import jax.numpy as jnp
import numpyro
from numpyro import distributions as dist
from numpyro.infer import Trace_ELBO

from tests.strangers.programs import Program, matrices, normal

ROWS, SIZE, HIDDEN, LATENT = 64, 16, 32, 4


def dense(half):
    """A product in `half` with a float32 result."""
    if half is None:
        return jnp.matmul
    return lambda x, weights: (x.astype(half) @ weights.astype(half)).astype(jnp.float32)


def elbo(model, guide, params, *data):
    """The negative ELBO a row of model(product, params, *data) and a guide of the same arguments."""

    def loss(half=None):
        def of(params, key, *data):
            return Trace_ELBO().loss(key, {}, model, guide, dense(half), params, *data) / ROWS

        return of

    return Program(loss(), params, (jax.random.key(0), *data), loss)


def bayesian():
    """A regression network with normal priors and a mean-field guide."""
    shapes = {"first": (SIZE, HIDDEN), "second": (HIDDEN, 1)}

    def model(product, weights, x, y):
        drawn = [
            numpyro.sample(name, dist.Normal(jnp.zeros(shape), 0.25).to_event(2)) for name, shape in shapes.items()
        ]
        mean = product(jnp.tanh(product(x, drawn[0])), drawn[1])[:, 0]
        with numpyro.plate("rows", ROWS):
            numpyro.sample("y", dist.Normal(mean, 0.3), obs=y)

    def guide(product, weights, x, y):
        for name in shapes:
            numpyro.sample(name, dist.Normal(weights[name], jnp.exp(weights[f"{name}_scale"])).to_event(2))

    means = matrices(0, **shapes)
    params = means | {f"{name}_scale": jnp.full(shape, -2.0) for name, shape in shapes.items()}
    x = normal(1, ROWS, SIZE)
    return elbo(model, guide, params, x, jnp.sin(x[:, 0]))


def vae():
    """A variational autoencoder of binary data."""

    def model(product, weights, data):
        with numpyro.plate("rows", ROWS):
            code = numpyro.sample("code", dist.Normal(jnp.zeros(LATENT), 1.0).to_event(1))
            logits = product(jax.nn.softplus(product(code, weights["decode"])), weights["pixels"])
            numpyro.sample("data", dist.Bernoulli(logits=logits).to_event(1), obs=data)

    def guide(product, weights, data):
        hidden = jax.nn.softplus(product(data, weights["encode"]))
        mean, scale = product(hidden, weights["mean"]), jnp.exp(product(hidden, weights["scale"]))
        with numpyro.plate("rows", ROWS):
            numpyro.sample("code", dist.Normal(mean, scale).to_event(1))

    shapes = {"encode": (SIZE, HIDDEN), "mean": (HIDDEN, LATENT), "scale": (HIDDEN, LATENT)}
    params = matrices(0, **shapes, decode=(LATENT, HIDDEN), pixels=(HIDDEN, SIZE))
    params["scale"] *= 0.1  # or a scale of exp(10) takes the gradient out of float16
    data = (normal(1, ROWS, SIZE) > 0).astype(jnp.float32)

    return elbo(model, guide, params, data)


PROGRAMS = {"numpyro Bayesian network": bayesian, "numpyro VAE": vae}
