"""Modules of flax that a function changes: what it changes arrives, or the function is refused."""

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mixedres.amp import autocast, explain
from tests.arrays import normal

X = normal(0, (16, 4)) + 1


class Network(nnx.Module):
    """Running statistics, a random stream and a layer that two attributes share."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.norm = nnx.Linear(4, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.dropout, self.last = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
        self.shared = self.last

    def __call__(self, x):
        return self.shared(self.last(self.dropout(jax.nn.relu(self.norm(self.first(x))))))


def loss(network, x):
    return jnp.mean(network(x) ** 2)


def three_steps(step):
    """Losses, running mean and draws of three calls on one network."""
    network = Network()
    losses = [float(jax.tree.leaves(step(network, X))[0]) for _ in range(3)]
    return losses, network.norm.mean[...], network.dropout.rngs.count[...]


@pytest.mark.parametrize(
    "transform", [lambda f: f, lambda f: nnx.jit(nnx.value_and_grad(f))], ids=["eager", "jit of value_and_grad"]
)
def test_running_statistics_and_random_streams_go_on(transform):
    losses, mean, draws = three_steps(transform(loss))
    own_losses, own_mean, own_draws = three_steps(transform(autocast(loss)))
    np.testing.assert_allclose(own_losses, losses, rtol=2e-3)
    np.testing.assert_allclose(own_mean, mean, atol=1e-3)
    assert own_draws == draws == 3 and len(set(own_losses)) == 3 and np.abs(mean).max() > 0.01


def test_module_given_twice_stays_one_module():
    def both(a, b, x):
        return a(x).sum() + b(x).sum()

    plain, own = Network(), Network()
    both(plain, plain, X)
    autocast(both)(own, own, X)
    np.testing.assert_allclose(own.norm.mean[...], plain.norm.mean[...], atol=1e-3)
    assert own.dropout.rngs.count[...] == 2


def test_variable_alone_is_updated_and_explaining_changes_nothing():
    counter = nnx.Variable(jnp.zeros(()))

    def count(counter, x):
        counter[...] += 1
        return x @ x.T

    explain(count)(counter, X)
    assert counter[...] == 0
    autocast(count)(counter, X)
    assert counter[...] == 1


def test_unchanged_variables_are_not_written():
    """A network from outside may be read in a jitted function, where writing it is an error of flax."""
    network = Network()
    network.eval()
    assert jax.jit(lambda x: autocast(loss)(network, x))(X).dtype == jnp.float32


def new_variable(network, x):
    network.more = nnx.Param(2 * x)
    return loss(network, x)


def new_attribute(network, x):
    network.calls = 3
    return loss(network, x)


@pytest.mark.parametrize("function", [new_variable, new_attribute])
def test_changed_structure_is_refused(function):
    with pytest.raises(TypeError, match=r"changes the structure of an nnx module .* nnx.split outside"):
        autocast(function)(Network(), X)


def test_module_from_outside_is_refused_with_the_cure():
    network = Network()
    with pytest.raises(flax.errors.TraceContextError) as caught:
        autocast(lambda x: loss(network, x))(X)
    assert "pass nnx modules that it changes as arguments" in caught.value.__notes__[0]


def test_changed_argument_that_is_no_module_is_refused():
    def update(state, x):
        state["sum"] = state["sum"] + (x @ x.T).sum()
        return state["sum"]

    with pytest.raises(TypeError, match=r"changes its argument \[0\]\['sum'\].* return the new value instead"):
        autocast(update)({"sum": jnp.zeros(())}, X)
    autocast(lambda state, x: state.pop("sum") + x @ x.T)({"sum": jnp.zeros(())}, X)  # nothing is lost


class Inside(nn.Module):
    """A layer that is created, or only called, under autocast inside the module around it."""

    half: bool

    def setup(self):
        self.norm = nn.BatchNorm(use_running_average=False)

    @nn.compact
    def __call__(self, x):
        cast = autocast if self.half else lambda f: f
        return cast(lambda x: nn.Dense(4)(x))(x)

    def normalized(self, x):
        return autocast(self.norm)(x)


def test_linen_variables_that_become_tracers_are_refused():
    with pytest.raises(
        TypeError, match=r"changes params/Dense_0/\w+ of the Inside around it.* autocast\(model.apply\)"
    ):
        Inside(True).init(jax.random.key(0), X)
    with pytest.raises(TypeError, match="of the Inside around it"):
        Inside(True).init(jax.random.key(0), X, method="normalized")


def test_linen_variables_can_be_read():
    variables = Inside(False).init(jax.random.key(0), X)
    inner, outer = Inside(True).apply, autocast(Inside(False).apply)
    np.testing.assert_array_equal(inner(variables, X), outer(variables, X))
    gradients = (jax.grad(lambda v, f=f: jnp.sum(f(v, X) ** 2))(variables) for f in (inner, outer))
    jax.tree.map(np.testing.assert_array_equal, *gradients)
