"""Random programs as data: steps of operations on earlier values, losses, and kinds of values."""

import dataclasses

import numpy as np
from hypothesis import strategies as st

from tests.amp.law import operations as of

VALUES = ("normal", "sure", "offset", "small", "large", "repeated", "decades")


@dataclasses.dataclass(frozen=True)
class Program:
    """A random program.

    Attributes:
      first: kinds of values of the two first values, narrow ones, of which the gradient is taken.
      steps: operations, with the numbers of their operands and the kind of values of their matrix of parameters.
      losses: losses with the number of the value that each reads.
      returned: numbers of the values that are returned beside the loss.
    """

    first: tuple[str, str]
    steps: tuple[tuple[str, tuple[int, ...], str], ...]
    losses: tuple[tuple[tuple[str, ...], int], ...]
    returned: tuple[int, ...]

    def arguments(self, seed):
        """Returns the first values and the parameters in float32, drawn from a seed."""
        rng = np.random.default_rng(seed)
        sizes = [("n", kind) for kind in self.first]
        sizes += [(size, kind) for name, _, kind in self.steps for size in of.OPS[name][2] if size.isupper()]
        return tuple(_drawn(rng, of.SHAPES[size], kind).astype(np.float32) for size, kind in sizes)

    def __call__(self, casts, *args):
        """Returns the loss, and the values that are returned beside it."""
        values, params = list(args[:2]), list(args[2:])
        for name, operands, _ in self.steps:
            kind, function, sizes, _ = of.OPS[name]
            given = [values[i] for i in operands] + [params.pop(0) for size in sizes if size.isupper()]
            values.append(getattr(casts, kind)(function, *given))
        losses = [
            casts.wide(of.LOSSES[name[0]], values[i]) if len(name) == 1 else of.cancelling(casts, *name, values[i])
            for name, i in self.losses
        ]
        return sum(losses[1:], start=losses[0]), [casts.wide(lambda x: x, values[i]) for i in self.returned]


def _drawn(rng, shape, kind):
    rows, columns = shape
    normal = rng.standard_normal(shape) / np.sqrt(min(rows, 2 * of.NARROW))
    if kind == "sure":  # logits of x @ w whose label is sure: x names the label of the row, w is diagonal
        peaks = np.resize(of.LABELS, rows) if rows == of.ROWS and columns == of.NARROW else np.arange(rows) % columns
        sure = 0.02 * normal
        sure[np.arange(rows), peaks] = rng.uniform(2.5, 4)
        return sure
    if kind == "repeated":
        return normal[:1] + 0 * normal
    factors = {"small": 1e-2, "large": 10, "decades": 10 ** rng.uniform(-3, 1, shape)}
    return normal * factors.get(kind, 1) + 4 * (kind == "offset")


@st.composite
def programs(draw):
    """Draws a program: mostly chains, with several readers of some values."""
    sizes, steps = ["n", "n"], []
    kinds = st.sampled_from(2 * VALUES if draw(st.booleans()) else [draw(st.sampled_from(VALUES))])
    for _ in range(draw(st.integers(1, 7))):
        slow = any(name.partition(",")[0] in of.SLOW for name, *_ in steps)
        names = [
            n
            for n, (_, _, operands, _) in of.OPS.items()
            if set(operands.lower()) and all(o.isupper() or o in sizes for o in operands)
        ]
        names = [n for n in names if not (slow and n.partition(",")[0] in of.SLOW)]
        products = [n for n in names if of.OPS[n][0] in ("product", "structure")]
        repeating = [n for n in names if n.partition(",")[0] in of.REPEATING]
        name = draw(
            st.sampled_from(
                products if not steps or draw(st.booleans()) else draw(st.sampled_from([names, names, repeating]))
            )
        )
        _, _, operands, result = of.OPS[name]
        near = [[i for i, size in enumerate(sizes) if size == o][-3:] for o in operands if o.islower()]
        steps.append((name, tuple(draw(st.sampled_from(found[::-1])) for found in near), draw(kinds)))
        sizes.append(result)
    last = len(sizes) - 1
    kinds_of_loss = st.one_of(
        st.tuples(st.sampled_from(list(of.LOSSES))), st.tuples(st.sampled_from(of.LINEAR), st.sampled_from(of.MOVING))
    )
    losses = [(draw(kinds_of_loss), i) for i in sorted({last, *draw(st.lists(st.integers(2, last), max_size=2))})]
    returned = tuple(draw(st.lists(st.integers(2, last), max_size=1)))
    return Program((draw(kinds), draw(kinds)), tuple(steps), tuple(losses), returned)
