"""Workarounds for Grain, one of them through a private name."""

import gc


def let_grain_start_processes() -> None:
    """Marks absl's flags as parsed, because Grain's processes read the flags, and only absl.app parses them."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def free_shared_memory() -> None:
    """Waits until Grain's thread has freed the memory that its processes shared.

    Otherwise a program that ends at once leaves the memory to Python's resource tracker, which warns about it.
    """
    gc.collect()
    from grain._src.python.ipc import shared_memory_array

    if pool := getattr(shared_memory_array.SharedMemoryArray, "_del_thread_pool", None):
        pool.apply(int)  # returns once the pool's one thread has done all earlier work
