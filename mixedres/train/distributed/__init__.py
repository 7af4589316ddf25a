"""Processes that train one network together: they connect, compare their configs and data, and stop together."""

from mixedres.train.distributed.group import SINGLE, ProcessGroup, SingleProcess
from mixedres.train.distributed.liveness import STATUS_LOST
from mixedres.train.distributed.startup import join

__all__ = ["SINGLE", "STATUS_LOST", "ProcessGroup", "SingleProcess", "join"]
