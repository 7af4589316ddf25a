"""A run of many processes: they find each other, agree on what they run, watch each other and stop together.

JAX's own runtime (`jax.distributed`) connects them; what stands here is what it leaves open: that a mistake or a death
ends in one line that names the process, within a bounded time, instead of a stack trace or a wait for ever.
"""

from mixedres.processes.group import STATUS_LOST, Processes
from mixedres.processes.join import join

ALONE = Processes()

__all__ = ["ALONE", "STATUS_LOST", "Processes", "join"]
