"""Comparison of the copies of the training state on all devices: nothing else in a run shows that copies differ."""

import collections
import concurrent.futures
import zlib
from collections.abc import Sequence

import jax
import numpy as np

from mixedres._internal.errors import DifferentCopiesError, listed
from mixedres._internal.processes import SingleProcess
from mixedres._internal.types import PyTree


def check_copies(state: PyTree, group: SingleProcess, step: int, newest: int | None) -> None:
    """Raises DifferentCopiesError in all processes if the copies of `state` on the devices of the run differ."""
    count = len(jax.tree.leaves(state)[0].addressable_shards)
    if group.count * count == 1:
        return
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        own = list(pool.map(lambda index: checksum(state, index), range(count)))
    if odd := odd_copies(group.gather(f"comparison of the state after step {step}", own)):
        stands = "there is no checkpoint yet" if newest is None else f"the checkpoint of step {newest} stands"
        raise DifferentCopiesError(
            f"the training state {odd} after step {step}, as after a fault of memory; the step is not saved, {stands}. "
            "Start the same command again to go on from there, without this host if it happens again"
        )


def checksum(state: PyTree, index: int) -> int:
    """Returns the CRC-32 of the copy of `state` on device `index` of this process."""
    # On the host: 0.12 s of a CPU core for the 205 MB of ResNet-50 with momentum. A program for the devices would be
    # twice as fast, but compiles for 17 s.
    found = 0
    for leaf in jax.tree.leaves(state):  # `addressable_data` would return the first copy for every index
        copy = np.ascontiguousarray(jax.device_get(leaf.addressable_shards[index].data))
        found = zlib.crc32(copy.reshape(-1).view(np.uint8), found)
    return found


def odd_copies(checksums: Sequence[Sequence[int]]) -> str:
    """Returns which copies differ, from the checksums of each process's devices; '' if all are equal."""
    copies = {f"process {i}, device {k}": found for i, own in enumerate(checksums) for k, found in enumerate(own)}
    (usual, count), *others = collections.Counter(copies.values()).most_common()
    if not others:
        return ""
    if 2 * count <= len(copies):
        return f"is not the same in {listed(list(copies), 8, '; ')}"
    odd = [name for name, found in copies.items() if found != usual]
    return f"in {listed(odd, 8, '; ')} is not that of the {count} other devices"
