"""Compiling what runs once."""

from __future__ import annotations

from typing import Any

import jax


def options(platform: str | None = None) -> dict[str, Any]:
    """Compiler options for a program that runs once; `platform`: not given, that of the default device.

    On a CPU most of its time would be the optimisation of its code.
    """
    return {"xla_backend_optimization_level": 0} if (platform or jax.default_backend()) == "cpu" else {}
