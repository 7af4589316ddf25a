"""What the batches of every source must be: continued at any step, divided among hosts, masked in evaluation."""

import contextlib
import functools
import itertools
import math

import numpy as np
import pytest

from mixedres.data import Shard


def take(source, batch_size, count, **options):
    """Returns the first training batches, whose types and shapes must be those of the source."""
    with contextlib.closing(source.train_batches(batch_size, **{"seed": 0, **options})) as batches:
        found = list(itertools.islice(batches, count))
    for batch in found:
        assert {key: value.dtype for key, value in batch.items()} == {"image": source.image_dtype, "label": np.int32}
        assert batch["image"].shape == (batch_size // options.get("shard", Shard()).count, *source.image_shape)
        assert batch["image"].flags["C_CONTIGUOUS"]
    return found


def same(a, b):
    pairs = list(zip(a, b, strict=False))
    keys_agree = len(a) == len(b) and all(x.keys() == y.keys() for x, y in pairs)
    return keys_agree and all(np.array_equal(x[key], y[key]) for x, y in pairs for key in x)


def joined(parts):
    """The batches of all hosts, one below the other."""
    return [
        {key: np.concatenate([part[key] for part in batches]) for key in batches[0]}
        for batches in zip(*parts, strict=True)
    ]


def check_epochs(found, examples, seed=0, epochs=3):
    """`found` tells which examples are in each batch: NumPy's permutation for (seed, 0, epoch), as far as it fills."""
    per_epoch = len(found) // epochs
    for epoch in range(epochs):
        order = np.random.default_rng((seed, 0, epoch)).permutation(examples)
        part = np.concatenate(found[epoch * per_epoch : (epoch + 1) * per_epoch])
        np.testing.assert_array_equal(part, order[: len(part)])


def check_continuation(source, batch_size, count, firsts, again=None):
    """A batch is a function of seed and step, in the source `again` as well; no batch is larger than the data."""
    again = again or source
    whole = take(source, batch_size, count, seed=5)
    for first in firsts:
        assert same(take(again, batch_size, count - first, seed=5, first_step=first), whole[first:])
    # Far along the run, without having to read what lies before.
    [late] = take(source, batch_size, 1, seed=5, first_step=10**9)
    assert same([late], take(again, batch_size, 1, seed=5, first_step=10**9))
    [other] = take(source, batch_size, 1, seed=6)
    assert not any(same([found], [batch]) for found in (late, other) for batch in whole)
    examples = source.train_examples
    with pytest.raises(ValueError, match=f"batch_size {examples + 1} is more than the {examples} training images"):
        take(source, examples + 1, 1)


def check_hosts(source, batch_size, hosts, firsts):
    """All hosts together have the rows of the global batch, and each of them the same number."""
    shards = [Shard(index, hosts) for index in range(hosts)]
    for first in firsts:
        options = {"seed": 2, "first_step": first}
        parts = [take(source, batch_size, 6, shard=shard, **options) for shard in shards]
        assert all(len(batch["label"]) == batch_size // hosts for part in parts for batch in part)
        assert same(joined(parts), take(source, batch_size, 6, **options))
    parts = [list(source.eval_batches(batch_size, shard=shard)) for shard in shards]
    assert {len(part) for part in parts} == {math.ceil(source.eval_examples / batch_size)}
    assert all(len(value) == batch_size // hosts for part in parts for batch in part for value in batch.values())
    assert same(joined(parts), list(source.eval_batches(batch_size)))
    assert sum(batch["mask"].sum() for part in parts for batch in part) == source.eval_examples
    if hosts > 1:
        for batches in (functools.partial(source.train_batches, seed=0), source.eval_batches):
            with pytest.raises(ValueError, match=f"batch_size {batch_size + 1} is not a multiple of the {hosts} hosts"):
                next(batches(batch_size + 1, shard=shards[0]))


def evaluated(source, batch_size):
    """The images and labels that count; whatever else fills the batches is zero."""
    batches = list(source.eval_batches(batch_size))
    assert len(batches) == math.ceil(source.eval_examples / batch_size)
    for batch in batches:
        assert {key: value.dtype for key, value in batch.items()} == {"image": "u1", "label": "i4", "mask": "?"}
        assert {len(value) for value in batch.values()} == {batch_size}
        assert not batch["image"][~batch["mask"]].any() and not batch["label"][~batch["mask"]].any()
    assert same(batches, list(source.eval_batches(batch_size)))
    return [np.concatenate([batch[key][batch["mask"]] for batch in batches]) for key in ("image", "label")]
