"""The configuration of a run: its keys, presets and overrides. Importing this imports no JAX."""

from mixedres._internal.errors import ConfigError
from mixedres.config.flags import Flags, config_of_run, load_config, parse_flags
from mixedres.config.keys import KEYS, Key
from mixedres.config.values import check_key, defaults, finish, flatten, split, unflatten, validate

__all__ = [
    "KEYS",
    "ConfigError",
    "Flags",
    "Key",
    "check_key",
    "config_of_run",
    "defaults",
    "finish",
    "flatten",
    "load_config",
    "parse_flags",
    "split",
    "unflatten",
    "validate",
]
