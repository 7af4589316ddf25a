"""jraph; by hand, parameters and features are cast to half."""

import jax
import jax.numpy as jnp
import jraph

from tests.strangers.programs import by_hand, cross_entropy, integers, matrices, normal, program

NODES, EDGES, SIZE, CLASSES = 48, 160, 16, 5


def graph(nodes, edges, senders, receivers):
    """One graph without features of its own."""
    sizes = jnp.array([NODES]), jnp.array([EDGES])
    return jraph.GraphsTuple(nodes, edges, receivers, senders, None, *sizes)


def arguments(labels, edges):
    """(nodes, edges or None, senders, receivers, labels)."""
    ends = integers(3, NODES, EDGES), integers(4, NODES, EDGES)
    return normal(1, NODES, SIZE), normal(2, EDGES, SIZE) if edges else None, *ends, integers(5, CLASSES, labels)


def graph_network():
    """A GraphNetwork of layers with softplus, then a class of every edge."""
    params = matrices(0, edge=(3 * SIZE, SIZE), node=(3 * SIZE, SIZE), head=(SIZE, CLASSES))

    def model(params, *features):
        def edge(edges, sent, received, _):
            return jax.nn.softplus(jnp.concatenate([edges, sent, received], 1) @ params["edge"])

        def node(nodes, sent, received, _):
            return jax.nn.softplus(jnp.concatenate([nodes, sent, received], 1) @ params["node"])

        layer = jraph.GraphNetwork(edge, node)
        return layer(layer(graph(*features))).edges @ params["head"]

    return program(by_hand(model), cross_entropy, params, *arguments(EDGES, True))


def attention():
    """Two layers of a GAT."""
    params = matrices(0, query=(SIZE, SIZE), logit=(2 * SIZE, 1), head=(SIZE, CLASSES))

    def model(params, *features):
        def logits(sent, received, _):
            return jax.nn.softplus(jnp.concatenate([sent, received], 1) @ params["logit"])

        layer = jraph.GAT(lambda nodes: nodes @ params["query"], logits, jnp.tanh)
        return layer(layer(graph(*features))).nodes @ params["head"]

    return program(by_hand(model), cross_entropy, params, *arguments(NODES, False))


def convolution():
    """Two layers of a GCN with self edges."""
    params = matrices(0, first=(SIZE, SIZE), second=(SIZE, CLASSES))

    def model(params, *features):
        def layer(name, inside):
            return jraph.GraphConvolution(lambda nodes: nodes @ params[name], add_self_edges=True)(inside)

        hidden = layer("first", graph(*features))
        return layer("second", hidden._replace(nodes=jnp.tanh(hidden.nodes))).nodes

    return program(by_hand(model), cross_entropy, params, *arguments(NODES, False))


PROGRAMS = {"jraph GraphNetwork": graph_network, "jraph GAT": attention, "jraph GCN": convolution}
