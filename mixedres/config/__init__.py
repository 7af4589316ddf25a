"""The configuration of a run: its keys, presets and overrides. Importing this imports no JAX."""

from mixedres._internal.errors import ConfigError
from mixedres.config.keys import KEYS, Key
from mixedres.config.values import check_key, defaults, finish, flatten, split, unflatten, validate

__all__ = [
    "KEYS",
    "ConfigError",
    "Key",
    "check_key",
    "defaults",
    "finish",
    "flatten",
    "split",
    "unflatten",
    "validate",
]
