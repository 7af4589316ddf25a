"""Configuration of a run: keys, presets, overrides and flags. Importing this package does not import JAX."""

from typing import TYPE_CHECKING

from mixedres._internal.errors import ConfigError
from mixedres._internal.lazy import importer
from mixedres.config.flags import Flags, config_of_run, load_config, override_machine, parse_flags, shipped_configs
from mixedres.config.keys import FREE, GROW, KEYS, Key, duration_in_steps, optimizer_options, profile_window
from mixedres.config.values import check_key, complete, defaults, finish, flatten, split, unflatten, validate, with_keys

if TYPE_CHECKING:
    from mixedres.config.precision import precision_of

__all__ = [
    "FREE",
    "GROW",
    "KEYS",
    "ConfigError",
    "Flags",
    "Key",
    "check_key",
    "complete",
    "config_of_run",
    "defaults",
    "duration_in_steps",
    "finish",
    "flatten",
    "load_config",
    "optimizer_options",
    "override_machine",
    "parse_flags",
    "precision_of",
    "profile_window",
    "shipped_configs",
    "split",
    "unflatten",
    "validate",
    "with_keys",
]

__getattr__ = importer(__name__)
