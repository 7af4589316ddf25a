"""Configs that older versions of mixedres recorded: names and values that changed, and keys that were added."""

from collections.abc import Mapping

from mixedres._internal.formats import without_stamp
from mixedres._internal.types import Json, Record

# Keys by their old names.
_RENAMED = {
    "data.eval_share": "data.eval_fraction",
    "optimizer.lr_batch_size": "optimizer.lr_reference_batch",
    "stop_after_skipped": "max_consecutive_skips",
    "train_only": "trainable",
}
# What versions without the key did, if the key's default does something else.
_BEFORE = {"batch_norm.unbiased": False}
# {(key, old value): today's value}, in versions that did not have the key `_SINCE`.
_REVALUED = {("data.preprocessing", "official"): "official_fast"}
_SINCE = "data.background"


def upgraded(recorded: Mapping[str, Json]) -> Record:
    """Returns a recorded flat config in today's keys and values.

    A key that the recording version did not have is added only if the key's default does something else.
    """
    config = _renamed(recorded)
    if _SINCE not in config:
        config |= {key: now for (key, old), now in _REVALUED.items() if config.get(key) == old}
    return _BEFORE | config


def as_begun(config: Mapping[str, Json], recorded: Mapping[str, Json]) -> Record:
    """Returns the values that a start must take from the older version's run that it continues.

    The same command had these values when the run began: a key that there was not yet, or a value that was renamed.

    Args:
      config: flat config of this start.
      recorded: flat config of the run, as it was recorded.
    """
    before, run = _renamed(recorded), upgraded(recorded)
    added = {key: value for key, value in run.items() if key not in before}
    changed = {key: value for key, value in run.items() if key in before and value != before[key] == config.get(key)}
    return {key: value for key, value in (added | changed).items() if config.get(key) != value}


def _renamed(recorded: Mapping[str, Json]) -> Record:
    return {_RENAMED.get(key, key): value for key, value in without_stamp(dict(recorded)).items()}
