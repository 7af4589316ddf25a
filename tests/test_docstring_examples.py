"""The examples in docstrings of the libraries run."""

import ast
import inspect
import re

import jax
import jax.numpy as jnp
import optax
import pytest

from mixedres import amp, models, numerics, precision
from tests.arrays import normal

LIBRARIES = (amp, models, numerics, precision)
# {name: the indented lines between the first line and the next paragraph of its docstring}
EXAMPLES = {
    name: found[1]
    for library in LIBRARIES
    for name in library.__all__
    if callable(value := getattr(library, name))
    and (found := re.search(r"\n\n((?:    .+\n)+)", inspect.cleandoc(value.__doc__ or "") + "\n"))
}


def test_functions_that_users_call_have_an_example():
    expected = {"autocast", "explain", "Lists", "Report", "create", "compare", "examine", "first_nonfinite", "tap"}
    assert (
        expected | {"get"} | {"loss_scaled", "enable_rewrite", "make_loss_scale", "DynamicLossScale"} <= EXAMPLES.keys()
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name, capsys):
    names = {library.__name__.rpartition(".")[2]: library for library in LIBRARIES} | {"jax": jax, "jnp": jnp}
    for library in LIBRARIES:
        names |= {public: getattr(library, public) for public in library.__all__}
    names |= {"optax": optax, "x": normal(0, (4, 8)), "w": normal(1, (8, 2)), "params": {"w": normal(2, (8, 2))}}
    names |= {"loss_fn": lambda params, x: jnp.square(x @ params["w"]).mean(), "fn": jnp.dot}
    source = inspect.cleandoc(EXAMPLES[name])
    ast.parse(source)
    exec(source, names)
