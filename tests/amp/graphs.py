"""What is read off a graph: the color of each operation, the dtypes of the products, the conversions, what is saved."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from mixedres._internal.jax_compat import bodies, equations, name_stack, opened, platform_branch
from mixedres.amp import explain

SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64", "None": "none"}
PRODUCTS = ("dot_general", "conv_general_dilated")


def colors(fn, *args, dtype=jnp.float16, **options):
    """'dot_general f16, tanh f32': the operations of `fn` in order, with what each computes in."""
    decisions = explain(fn, dtype, **options)(*args).decisions
    return ", ".join(f"{d.primitive.replace('dot_general', 'dot')} {SHORT[str(d.dtype)]}" for d in decisions)


def product_dtypes(jaxpr):
    """The dtypes that the products of a jaxpr read, as short names; what float32 alone reads they write in float32."""
    atoms = [atom for eqn in products(jaxpr) for atom in eqn.invars]
    return {SHORT[str(atom.aval.dtype)] for atom in atoms}


def products(jaxpr):
    """The equations of a jaxpr that are products."""
    return [eqn for eqn in equations(jaxpr) if eqn.primitive.name in PRODUCTS]


def distance(got, want):
    """The relative L2 distance of two trees."""
    flat = [np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(x)]) for x in (got, want)]
    return float(np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1]))


def floats(tree):
    """The leaves that are floating-point arrays."""
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]


def error(got, want):
    """The largest error of any array, relative to its largest number; no number if one is not finite."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert [leaf.dtype for leaf in jax.tree.leaves(got)] == [leaf.dtype for leaf in jax.tree.leaves(want)]
    pairs = [(np.float64(a), np.float64(b)) for a, b in zip(floats(got), floats(want), strict=True)]
    return float(np.max([np.abs(a - b).max() / max(np.abs(b).max(), 1e-30) for a, b in pairs]))


def line_of(fn, below=1):
    """The file and the number of a line below the `def` of a function, as a report has it."""
    return f"{pathlib.Path(fn.__code__.co_filename).name}:{fn.__code__.co_firstlineno + below} ({fn.__qualname__})"


def conversions(jaxpr):
    """How often a jaxpr converts."""
    return sum(eqn.primitive.name == "convert_element_type" for eqn in equations(jaxpr))


def dtypes_by(place, jaxpr, scope=""):
    """{place(scope): dtypes of the operands of the products there}; a scope is '/jvp(ResNet)/head'."""
    found = {}
    for eqn in opened(jaxpr)[0].eqns:
        here = f"{scope}/{name_stack(eqn)}"
        if eqn.primitive.name in PRODUCTS:
            dtypes = {SHORT[str(atom.aval.dtype)] for atom in eqn.invars}
            found.setdefault(place(here), set()).update(dtypes)
        branch = platform_branch(eqn, None)
        for inner in bodies(eqn) if branch is None else [branch]:
            for key, dtypes in dtypes_by(place, inner, here).items():
                found.setdefault(key, set()).update(dtypes)
    return found
