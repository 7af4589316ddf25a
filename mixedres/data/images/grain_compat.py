"""Workarounds for Grain, one of them through a private name."""

import gc


def let_grain_start_processes() -> None:
    """Grain's processes ask absl for its flags, which a program without absl.app never parsed."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def free_shared_memory() -> None:
    """Waits until Grain's thread has freed the memory that its processes shared.

    Without this a program that ends at once leaves the blocks to Python's resource tracker, which complains about them.
    """
    gc.collect()
    from grain._src.python.ipc import shared_memory_array

    if pool := getattr(shared_memory_array.SharedMemoryArray, "_del_thread_pool", None):
        pool.apply(int)  # its one thread has done everything that came before
