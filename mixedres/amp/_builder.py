"""Construction of the graph of a traced program: one node per equation, with the equations of calls inlined."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from mixedres._internal import jax_compat
from mixedres._internal.jaxprs import control_flow
from mixedres._internal.jaxprs.control_flow import STRUCTURE
from mixedres._internal.tree import HALF, is_inexact
from mixedres._internal.types import Aval, Equation, Jaxpr
from mixedres.amp._coloring import color
from mixedres.amp._cotangents import sum_in_float32
from mixedres.amp._evaluation.custom_derivatives import differentiated, variable
from mixedres.amp._evaluation.recompute import activations
from mixedres.amp._graph import Graph, Node, Path, Scope, Value, folded, known, unfit
from mixedres.amp._keep import Keep, reason_to_keep
from mixedres.amp._patterns import keep_float32_results
from mixedres.amp._rules import DENY_SUMS, Lists
from mixedres.amp._widen import widen


@dataclasses.dataclass(frozen=True)
class Settings:
    """Checked options of a rewrite; see `autocast`."""

    dtype: np.dtype
    lists: Lists
    keep: Keep
    allreduce_dtype: str = "param"


class _Builder:
    def __init__(self, settings: Settings, platform: str | None, backward_rules: bool) -> None:
        self.settings, self.platform, self.backward_rules = settings, platform, backward_rules
        self.lists, self.dtype, self.keep = settings.lists, settings.dtype, settings.keep
        self.nodes: list[Node] = []
        self.calls: dict[Path, Equation] = {}
        self.arguments: dict[Path, list[Value]] = {}
        self.results: dict[Path, list[Value]] = {}
        self.controls: dict[Path, Value] = {}

    def jaxpr(self, jaxpr: Jaxpr, path: Path, scope: Scope, args: list[Value]) -> list[Value]:
        """Adds a body with the arguments `args` and returns its results."""
        self.arguments[path] = args
        inner, consts = jax_compat.opened(jaxpr)
        return jax_compat.interpret(
            inner,
            [Value(v.aval, constant=known(const)) for v, const in zip(inner.constvars, consts, strict=True)],
            args,
            lambda index, eqn, ins: self.equation(eqn, (*path, index), scope, ins),
            lambda atom: Value(atom.aval, constant=known(atom.val)),
            binds=False,
        )

    def equation(self, eqn: Equation, path: Path, scope: Scope, ins: list[Value]) -> list[Value]:
        name = eqn.primitive.name
        scope = scope.at(eqn)
        if name in STRUCTURE:
            self.calls[path] = eqn
        if name in ("custom_jvp_call", "custom_vjp_call"):
            return self.custom_rule(eqn, path, scope, ins)
        if found := control_flow.bodies(eqn, self.platform):
            self.arguments[path], self.results[path] = ins, self.call(eqn, found, path, scope, ins)
            return self.results[path]
        return self.leaf(eqn, path, scope, ins, self.lists.category(name), name in DENY_SUMS)

    def leaf(
        self, eqn: Equation, path: Path, scope: Scope, ins: list[Value], category: str, sums: bool, program: Any = None
    ) -> list[Value]:
        outs = [Value(var.aval) for var in eqn.outvars]
        if len(outs) == 1 and not program:
            outs[0].constant = folded(eqn, [value.constant for value in ins])
        node = self.add(Node(path, eqn, category, scope, ins, outs, sums, program))
        if program is None and node.touches_f32 and (reason := reason_to_keep(self.keep, scope, jax_compat.body(eqn))):
            # As after a sum: outside of the layer, a product may store the result in half.
            node.category, node.sums = "deny", sums or category != "deny"
            node.keep_float32, node.reason = True, reason
        return node.outs

    def add(self, node: Node) -> Node:
        for value in node.ins:
            value.consumers.append(node)
        for value in node.outs:
            value.producer = node
        self.nodes.append(node)
        return node

    def merge(self, path: Path, scope: Scope, ins: list[Value], aval: Aval) -> Node:
        return self.add(Node(path, None, "merge", scope, list(ins), [Value(aval)]))

    def call(
        self, eqn: Equation, found: list[control_flow.Body], path: Path, scope: Scope, ins: list[Value]
    ) -> list[Value]:
        """Adds bodies. A carry of a loop is a merge of its first and next value, a result of a cond one of branches."""
        initial = ins[found[-1].carry]
        state = [self.merge((*path, -1, i), scope, [value], value.aval) for i, value in enumerate(initial)]
        carry = [node.outs[0] for node in state]
        results = [
            self.jaxpr(body.jaxpr, (*path, i), scope.inside(body.label), [*ins[body.consts], *carry, *ins[body.slices]])
            for i, body in enumerate(found)
        ]
        for node, value in zip(state, results[-1], strict=False):
            node.ins.append(value)
            value.consumers.append(node)
        if eqn.primitive.name == "while":
            self.controls[path] = results[0][0]
        if eqn.primitive.name != "cond" or len(found) == 1:
            return [*carry, *results[-1][len(carry) :]]
        self.controls[path] = ins[0]
        return [
            self.merge((*path, -1, i), scope, list(values), eqn.outvars[i].aval).outs[0]
            for i, values in enumerate(zip(*results, strict=True))
        ]

    def custom_rule(self, eqn: Equation, path: Path, scope: Scope, ins: list[Value]) -> list[Value]:
        """Adds one node for a custom derivative; with products in it, or in a backward rule, it has a graph."""
        body, is_vjp = eqn.params["call_jaxpr"], eqn.primitive.name == "custom_vjp_call"
        categories = dict(_categories(body, self.lists, self.dtype, self.platform))
        has_products = "allow" in categories
        if (has_products or is_vjp) and not reason_to_keep(self.keep, scope):

            def graph(jaxpr: Jaxpr, label: str = "", backward_rules: bool = self.backward_rules) -> Graph:
                inside = scope.inside(_name(body) + label)
                return build(jaxpr, self.settings, inside, self.platform, backward_rules=backward_rules)

            @functools.cache  # which traces the rule: only where its products decide, or for a report
            def backward() -> Graph | None:
                with jax_compat.as_written(eqn):
                    # A backward rule may call its own function, so backward rules inside it have no graph.
                    rule = _backward(eqn, self.lists) if is_vjp and self.backward_rules else None
                return None if rule is None else graph(rule, " backward", False)

            program = graph(body) if has_products else None
            if not (program and program.has_half(())):
                found = backward()
                program = program or graph(body) if found and found.has_half(()) else None
            results = self.leaf(eqn, path, scope, ins, "unlisted", False, program)
            self.nodes[-1].backward = backward
            return results
        if is_vjp:
            return self.leaf(eqn, path, scope, ins, "unlisted", False)
        worst = next((c for c in ("unlisted", "deny", "infer", "clear") if c in categories), "clear")
        return self.leaf(eqn, path, scope.inside(_name(body)), ins, worst, categories.get("deny", False))


def build(
    jaxpr: Jaxpr,
    settings: Settings,
    scope: Scope,
    platform: str | None,
    *,
    whole: bool = False,
    backward_rules: bool = True,
) -> Graph:
    """Builds and colors the graph of a closed jaxpr; `whole` if the program is no part of another."""
    builder = _Builder(settings, platform, backward_rules)
    args = [Value(var.aval) for var in jax_compat.opened(jaxpr)[0].invars]
    for value in builder.jaxpr(jaxpr, (), scope, args):
        value.returned = True
    by_path = {node.path: node for node in builder.nodes}
    options = settings.dtype, settings.lists, settings.allreduce_dtype, platform
    regions = builder.calls, builder.arguments, builder.results, builder.controls
    graph = Graph(jaxpr, builder.nodes, *options, by_path, *regions)
    color(graph)
    if whole:
        keep_float32_results(graph)
    widen(graph)
    sum_in_float32(graph)
    graph.index_regions()
    graph.recomputed = activations(graph)
    return graph


def _backward(eqn: Equation, lists: Lists) -> Any:
    """Returns the backward rule of a custom_vjp_call as a jaxpr; None without products, or if it is not traceable."""
    # A rule that asks which operands have a gradient is not traced: it may refuse some.
    if eqn.params["symbolic_zeros"]:
        return None
    forward, backward = differentiated(eqn, variable(eqn))
    try:
        # For the same reason the function goes first: it raises where the axes that its rule uses are not here.
        jax.eval_shape(lambda *operands: jax_compat.bind(eqn, *operands), *(var.aval for var in eqn.invars))
        results, pullback = jax.eval_shape(forward, *(var.aval for var in eqn.invars))
        jaxpr = jax.make_jaxpr(backward)(pullback, [result for result in results if is_inexact(result)])
    except RecursionError:
        raise
    except Exception:  # it is the user's, and may need what is not here, such as the axes of a surrounding shard_map
        return None
    products = (inner for inner in jax_compat.equations(jaxpr) if lists.category(inner.primitive.name) == "allow")
    return jaxpr if any(products) else None


def _name(jaxpr: Jaxpr) -> str:
    """Returns the name of the function of a custom derivative rule, 'custom rule' if the name is unknown."""
    eqns = jax_compat.opened(jaxpr)[0].eqns
    names = [eqn.params["name"] for eqn in eqns if "name" in eqn.params and eqn.primitive.name in ("jit", "pjit")]
    info = getattr(jax_compat.opened(jaxpr)[0], "debug_info", None)
    return names[0] if len(eqns) == 1 and names else getattr(info, "func_name", None) or "custom rule"


def _categories(jaxpr: Jaxpr, lists: Lists, dtype: np.dtype, platform: str | None) -> Iterator[tuple[str, bool]]:
    """Yields (category, whether all its ops are sums) for the equations of a body on float32 or half."""
    found: dict[str, bool] = {}
    for eqn in jax_compat.opened(jaxpr)[0].eqns:
        name = eqn.primitive.name
        atoms = [*eqn.invars, *eqn.outvars]
        if not any(getattr(atom.aval, "dtype", None) in (jnp.float32, *HALF) for atom in atoms):
            continue
        bodies = control_flow.bodies(eqn, platform)
        nested = [item for body in bodies for item in _categories(body.jaxpr, lists, dtype, platform)]
        if control_flow.called(eqn, platform):
            inner = nested
        elif bodies:
            inner = [("unlisted", False), *(item for item in nested if item[0] == "allow")]
        else:
            outside = any(isinstance(a, Literal) and unfit(np.asarray(a.val), dtype) for a in eqn.invars)
            inner = [("deny", True)] if outside else [(lists.category(name), name in DENY_SUMS)]
        for category, sums in inner:
            found[category] = found.get(category, True) and sums
    yield from found.items()
