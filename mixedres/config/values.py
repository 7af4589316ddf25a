"""Configuration of a run: made from defaults, a preset and overrides, and checked.

`mixedres.config.keys` lists the keys.

A config file (``configs/*.py``) starts from `defaults`, assigns what its experiment needs and ends with `finish`, which
applies the part after the colon of ``--config=FILE:PRESET,key=value``. `validate` checks a finished config before
anything is built.
"""

import ast
import difflib
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict, config_dict

from mixedres._internal.errors import ConfigError, config_errors
from mixedres._internal.files import as_json
from mixedres._internal.names import PRESETS, unknown_preset
from mixedres.config.keys import KEYS, RETIRED, check_optimizer, optimizer_defaults

BOOLEANS = {"true": True, "false": False, "True": True, "False": False}
_BY_PATH = {key.path: key for key in KEYS}


class Config(ConfigDict):  # type: ignore[misc]
    """A config that takes numbers of NumPy and JAX as Python's, by attribute and by key."""

    def __setitem__(self, key: str, value: object) -> None:
        super().__setitem__(key, _plain(value))


class Optimizer(Config):
    """The section `optimizer`: another name brings the defaults of its optimizer, but for keys set since `settle`."""

    def __init__(self, *given: Any, **options: Any) -> None:
        object.__setattr__(self, "_chosen", set())  # a plain attribute, and no key
        super().__init__(*given, **options)

    def __setitem__(self, key: str, value: object) -> None:
        before = self.get("name")
        super().__setitem__(key, value)
        self._chosen.add(key)
        if key == "name" and self.name != before:
            for option, default in optimizer_defaults(self.name).items():
                if option in self and option not in self._chosen:
                    super().__setitem__(option, default)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # of a copy, sets every key
        object.__setattr__(self, "_chosen", set(state["_chosen"]))

    def settle(self) -> None:
        """Takes what is set as numbers of this optimizer, which another one does not take over."""
        self._chosen.clear()


def _plain(value: Any) -> object:
    """Returns `_number` of a value, or of each value of a list or a tuple."""
    return type(value)(map(_number, value)) if type(value) in (list, tuple) else _number(value)


def _number(value: Any) -> object:
    """Returns a number of NumPy or JAX as Python's, an array of one axis as a tuple, and other values unchanged."""
    axes = getattr(value, "ndim", None)
    if not isinstance(axes, int) or axes > 1:
        return value
    found = value.tolist()
    if axes == 1:
        return tuple(found)
    return float(found) if hasattr(found, "dtype") else found  # np.longdouble


def defaults() -> ConfigDict:
    """Returns a fresh config with every key of `KEYS` at its default."""
    config = Config()
    for key in KEYS:
        *sections, name = key.path.split(".")
        section = config
        for part in sections:
            if part not in section:
                section[part] = Optimizer() if part == "optimizer" else Config()
            section = section[part]
        section[name] = config_dict.placeholder(key.type)
        section[name] = key.default
    config.optimizer.settle()
    return config


def split(argument: str) -> tuple[str, dict[str, str]]:
    """Splits the argument after the colon of --config: 'fp16,model=resnet101' -> ('fp16', {'model': 'resnet101'}).

    Without a preset the result has 'fp32'.

    Raises ConfigError for a part that is neither first nor key=value.
    """
    preset, overrides = "fp32", {}
    # A comma inside brackets belongs to the value.
    for index, part in enumerate(filter(None, re.split(r",(?![^(\[]*[)\]])", argument))):
        key, equals, value = part.partition("=")
        if equals:
            overrides[key.strip()] = value.strip()
        elif index == 0:
            preset = part.strip()
        else:
            raise ConfigError(f"{part!r} after the colon of --config is not key=value; write PRESET,key=value,...")
    return preset, overrides


def finish(config: ConfigDict, preset: str, overrides: dict[str, str]) -> ConfigDict:
    """Sets the preset and the overrides; a section's name alone means its `name`: model=resnet101.

    Raises ConfigError for an unknown preset or key and for a value of the wrong type.
    """
    if preset not in PRESETS:
        raise ConfigError(f"--config=FILE:PRESET: {unknown_preset(preset)}")
    config.precision.name = preset
    config.optimizer.settle()
    for name, text in overrides.items():
        override(config, key_path(name), text)
    return config


def key_path(name: str) -> str:
    """Returns the path of a key; a section's name alone means its `name`: 'model' -> 'model.name'."""
    return f"{name}.name" if f"{name}.name" in _BY_PATH else name


def override(config: ConfigDict, path: str, text: str) -> None:
    """Sets a key of a config to the value that a text means; raises ConfigError for an unknown key or another type.

    'None' unsets a key that is not set by default. Booleans are true, false, True or False; texts need no quotes; other
    values are Python literals, and what is no literal is a text.
    """
    check_key(path)
    key = _BY_PATH[path]
    if text == "None" and key.default is None:
        value: object = None
    elif key.type is str:
        value = text
    else:
        value = _literal(text)
    _assign(config, path, value)


def _literal(text: str) -> object:
    try:
        return BOOLEANS[text] if text in BOOLEANS else ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def is_switch(path: str) -> bool:
    """Returns whether the key `path` is boolean, so that its flag needs no value; raises ConfigError for no key."""
    check_key(path)
    return _BY_PATH[path].type is bool


def _assign(config: ConfigDict, path: str, value: object) -> None:
    *sections, name = path.split(".")
    for part in sections:
        config = config[part]
    try:
        config[name] = value
    except (TypeError, ValueError, OverflowError):
        raise _wrong_type(path, value) from None


def _wrong_type(path: str, value: object) -> ConfigError:
    kind = _BY_PATH[path].type.__name__
    words = {"bool": "true or false", "tuple": "a tuple, such as 30,60 or 30,"}
    given = " ".join(repr(value).split())  # an array has several lines
    return ConfigError(f"config.{path} is {given:.200}; it must be {words.get(kind, f'of type {kind}')}")


def _nearest(path: str) -> str:
    inside = [key for key in _BY_PATH if key.startswith(f"{path}.")]
    close = (
        [key for key in inside if key == f"{path}.name"]
        or inside
        or difflib.get_close_matches(path, _BY_PATH, n=3, cutoff=0.5)
    )
    return f"did you mean {' or '.join(close)}?" if close else "no key is like it"


def check_key(path: str) -> None:
    """Raises `ConfigError` unless `path` is a key; for a retired key the message says what took its place."""
    if path in RETIRED:
        raise ConfigError(f"config key {path!r} is retired: {RETIRED[path].instead}")
    if path not in _BY_PATH:
        raise ConfigError(f"config key {path!r} is unknown; {_nearest(path)} (--help=all lists them)")


def validate(config: ConfigDict) -> None:
    """Checks keys, types, ranges and the length of the run; touches no device.

    Raises ConfigError at the first mistake.
    """
    flat = flatten(config)
    for path, value in flat.items():
        check_key(path)
        key = _BY_PATH[path]
        wanted = (int, float) if key.type is float else key.type
        if value is None and key.default is None:
            continue
        if not isinstance(value, wanted) or (isinstance(value, bool) and key.type in (int, float)):
            raise _wrong_type(path, value)
        if not key.range.allows(value):
            raise ConfigError(f"config.{path} is {value!r}; it must be {key.range.description}")
    missing = [path for path in _BY_PATH if path not in flat]
    if missing:
        raise ConfigError(f"config.{missing[0]} is missing; start the config file from mixedres.config.defaults()")
    if config.epochs is None and config.steps is None:
        raise ConfigError("config.epochs and config.steps are both missing; set one, such as --config.epochs=90")
    if config.batch_size is None and config.batch_size_per_device is None:
        raise ConfigError(
            "config.batch_size and config.batch_size_per_device are both missing; set one, such as "
            "--config.batch_size=256"
        )
    if len(config.schedule.boundaries) != len(config.schedule.factors):
        raise ConfigError(
            f"config.schedule: boundaries must have one factor each, got {config.schedule.boundaries} and "
            f"{config.schedule.factors}; set both, such as --config.schedule.boundaries=30,60 "
            "--config.schedule.factors=0.1,0.01"
        )
    with config_errors("config.optimizer"):
        check_optimizer(config.optimizer.to_dict())


def flatten(config: ConfigDict) -> dict[str, Any]:
    """Returns {'optimizer.name': 'sgd', ...}, sorted by key; tuples stay tuples."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            flat |= {f"{name}.{path}": inner for path, inner in flatten(value).items()}
        else:
            flat[name] = value
    return dict(sorted(flat.items()))


def complete(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a flat config that was read as JSON with today's keys; keys that `flat` lacks have their defaults.

    Raises ConfigError for an unknown key, a key that was retired and is not ignored, and for an invalid value.
    """
    ignored = {path for path, key in RETIRED.items() if key.ignored}
    config = unflatten({path: value for path, value in flat.items() if path not in ignored})
    validate(config)
    whole: dict[str, Any] = as_json(flatten(config))
    return whole


def unflatten(flat: Mapping[str, Any]) -> ConfigDict:
    """Returns the config of a result of `flatten`, which may have been written and read as JSON since.

    Raises ConfigError for an unknown key and for a value of the wrong type.
    """
    config = defaults()
    _assign_all(config, {key.path: key.default for key in KEYS} | dict(flat))
    config.optimizer.settle()
    return config


def with_keys(config: ConfigDict, given: Mapping[str, Any]) -> ConfigDict:
    """Returns a copy of a config with some keys set; 'model' means 'model.name', as after the colon of --config.

    None sets a key to its default. Raises ConfigError as `unflatten`.
    """
    copy = unflatten(flatten(config))
    paths = {key_path(name): value for name, value in given.items()}
    _assign_all(copy, {p: str(value) if isinstance(value, pathlib.PurePath) else value for p, value in paths.items()})
    return copy


def _assign_all(config: ConfigDict, flat: Mapping[str, Any]) -> None:
    for path, value in flat.items():
        check_key(path)
        value = _BY_PATH[path].default if value is None else value
        _assign(config, path, tuple(value) if isinstance(value, list) else value)
