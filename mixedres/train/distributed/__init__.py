"""A run of many processes: they find each other, agree on what they run, watch each other and stop together.

JAX's own runtime (`jax.distributed`) connects them; what stands here is what it leaves open: that a mistake or a death
ends in one line that names the process, within a bounded time, instead of a stack trace or a wait for ever.
"""

from mixedres.train.distributed.group import SingleProcess
from mixedres.train.distributed.join import join
from mixedres.train.distributed.watch import STATUS_LOST

SINGLE = SingleProcess()

__all__ = ["SINGLE", "STATUS_LOST", "SingleProcess", "join"]
