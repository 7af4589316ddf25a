"""Workarounds for Grain and for the shared memory of its processes, some of them through private names."""

import functools
import gc
from typing import Any


def let_grain_start_processes() -> None:
    """Marks absl's flags as parsed, because Grain's processes read the flags, and only absl.app parses them."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def free_shared_memory() -> None:
    """Waits until Grain's thread has freed the memory that its processes shared; Python warns of such memory."""
    gc.collect()
    from grain._src.python.ipc import shared_memory_array

    if pool := getattr(shared_memory_array.SharedMemoryArray, "_del_thread_pool", None):
        pool.apply(int)  # returns once the pool's one thread has done all earlier work


@functools.cache
def register_before_creation() -> None:
    """Makes Python register semaphores and shared memory for removal before, not after, it creates them."""
    from multiprocessing import resource_tracker, shared_memory, synchronize

    semaphores: Any = synchronize.SemLock
    blocks: Any = shared_memory
    name_of_semaphore, name_of_block = semaphores._make_name, blocks._make_filename

    def semaphore(created: Any) -> str:
        name: str = name_of_semaphore()
        if not getattr(created, "_is_fork_ctx", True):  # those for fork lose their name at once
            resource_tracker.register(name, "semaphore")
        return name

    def block() -> str:
        name: str = name_of_block()
        resource_tracker.register(name, "shared_memory")
        return name

    semaphores._make_name, blocks._make_filename = semaphore, block
