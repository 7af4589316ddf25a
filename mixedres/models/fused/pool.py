"""3x3 max-pooling with stride 2 that saves the position of each maximum in a byte; its gradient is a gather."""

import jax
import jax.numpy as jnp

from mixedres.models.operations import pads

# {rows of padding before a map: for even rows, and for odd rows: (row in a window, place of the window among the padded
# windows)}.
_TAPS = {1: ([(1, 0)], [(2, 0), (0, 1)]), 0: ([(2, 0), (0, 1)], [(1, 1)])}


def max_pool(x: jax.Array, padding: str) -> tuple[jax.Array, jax.Array]:
    """Returns the 3x3 max pool with stride 2 and the position of each first maximum or NaN in its window, 0 to 8."""
    around = [pads(extent, 3, 2, padding) for extent in x.shape[1:3]]
    padded = jnp.pad(x, ((0, 0), *around, (0, 0)), constant_values=-jnp.inf)
    rows, columns = -(-x.shape[1] // 2), -(-x.shape[2] // 2)

    def value(k: int) -> jax.Array:
        i, j = divmod(k, 3)
        end = (x.shape[0], i + 2 * rows - 1, j + 2 * columns - 1, x.shape[3])
        return jax.lax.slice(padded, (0, i, j, 0), end, (1, 2, 2, 1))

    largest, where = value(0), jnp.zeros((x.shape[0], rows, columns, x.shape[3]), jnp.uint8)
    for k in range(1, 9):
        where = jnp.where(value(k) > largest, jnp.uint8(k), where)
        largest = jnp.maximum(largest, value(k))
    return largest, where


def unpool(g: jax.Array, where: jax.Array, shape: tuple[int, ...], padding: str) -> jax.Array:
    """Returns the gradient of `max_pool` for an input of `shape` (b, h, w, c), given the gradient `g` of the maxima.

    With a row of padding before the map, an even row lies in one row of windows, as the middle row, and an odd row in
    two, as the last and the first row. Without padding, an even row lies in two rows of windows and an odd row in one.
    """
    before = [pads(extent, 3, 2, padding)[0] for extent in shape[1:3]]
    around = ((0, 0), *((1 - rows, rows) for rows in before), (0, 0))
    g_padded, where_padded = jnp.pad(g, around), jnp.pad(where, around, constant_values=9)
    rows, columns = g.shape[1:3]

    def taken(row: tuple[int, int], column: tuple[int, int]) -> jax.Array:
        (i, down), (j, right) = row, column
        window = (slice(None), slice(down, down + rows), slice(right, right + columns))
        return jnp.where(where_padded[window] == 3 * i + j, g_padded[window], 0)

    row_taps, column_taps = (_TAPS[rows] for rows in before)
    lines = []
    for of_row in row_taps:
        cells = [sum(taken(row, column) for row in of_row for column in of_column) for of_column in column_taps]
        lines.append(jnp.stack(cells, 3))  # (b, rows, columns, 2, c)
    whole = jnp.stack(lines, 2).reshape(g.shape[0], 2 * rows, 2 * columns, g.shape[3])
    return whole[:, : shape[1], : shape[2]]
