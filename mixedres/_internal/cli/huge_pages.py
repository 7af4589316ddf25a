"""Memory of a process in huge pages: else page faults take up to a quarter of a CPU step (docs/performance.md)."""

import contextlib
import os
import pathlib
import sys

_VARIABLE, _SETTING = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"
_FIRST_GLIBC = (2, 35)  # that knows the setting
_MODE = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")


def ask() -> None:
    """Starts this process again with huge pages; returns if GLIBC_TUNABLES is set or the system gives none."""
    if _would_help():
        os.environ[_VARIABLE] = _SETTING
        with contextlib.suppress(OSError):  # it works without, too
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _would_help() -> bool:
    """Returns whether glibc knows the setting, and Linux gives huge pages only on request (the mode 'madvise')."""
    if _VARIABLE in os.environ or not sys.executable or _glibc() < _FIRST_GLIBC:
        return False
    try:
        return "[madvise]" in _MODE.read_text()
    except OSError:
        return False


def _glibc() -> tuple[int, ...]:
    """Returns the version of glibc, such as (2, 36); () without glibc."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        return tuple(int(part) for part in version.split(".")) if name == "glibc" else ()
    except (AttributeError, ValueError, OSError):  # another system or another C library
        return ()
