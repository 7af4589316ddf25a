"""Processes on several hosts that train one network together: they connect, watch each other, and stop together."""

from typing import TYPE_CHECKING

from mixedres._internal.lazy import importer

if TYPE_CHECKING:
    from mixedres.hosts.group import ProcessGroup
    from mixedres.hosts.liveness import STATUS_LOST
    from mixedres.hosts.startup import join

__all__ = ["STATUS_LOST", "ProcessGroup", "join"]

__getattr__ = importer(__name__)
