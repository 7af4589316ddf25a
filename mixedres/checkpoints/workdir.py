"""The directory of a run: its files, and whether a new start may continue in it."""

import pathlib
from collections.abc import Collection
from typing import Any

from mixedres._internal.errors import ConfigError, listed
from mixedres._internal.files import as_json, is_locked, parse_json, read_regular
from mixedres.config import recorded
from mixedres.config.keys import FREE, GROW, KEYS

CONFIG, DATA, METRICS, SUMMARY, CHECKPOINTS, LOCK = (
    recorded.FILE,
    recorded.DATA,
    "metrics.jsonl",
    "summary.json",
    recorded.CHECKPOINTS,
    ".lock",
)
# Directory of a step that was not finite, and its name while it is written.
NONFINITE = ("nonfinite", ".nonfinite")
EVENTS = "events.out.tfevents.*"
# The identity of the run at Weights & Biases, and the directory of what wandb writes.
WANDB_ID, WANDB = "wandb.json", "wandb"
# The directory of traces for TensorBoard, which wants them in plugins/profile, and a trace in it by its first step.
PROFILE, TRACES = "profile", "plugins/profile/from_step_*"
_DEFAULTS = {key.path: list(key.default) if isinstance(key.default, tuple) else key.default for key in KEYS}
# What versions without the key did, where that is not its default.
_BEFORE = {"batch_norm.unbiased": False}
_RESUME = {key.path: key.resume for key in KEYS}


def in_use(workdir: pathlib.Path) -> bool:
    """Whether a run is under way in `workdir`, judging by its lock."""
    return is_locked(workdir / LOCK)


def finished(workdir: pathlib.Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """The summary of a finished run that `config` does not extend; else None. `workdir` was claimed with `config`."""
    old = recorded.read(workdir)
    if old is None or check_same(workdir, config):
        return None
    top1, wanted = config.get("stop_at_top1"), old.get("stop_at_top1")
    if wanted is not None and (top1 is None or top1 > wanted):
        return None
    return read_summary(workdir)


def check_same(workdir: pathlib.Path, config: dict[str, Any], only: Collection[str] | None = None) -> bool:
    """Raises `ConfigError` unless `workdir` holds a run that `config` may continue, and lists the differences.

    Each key says whether it may change (`mixedres.config.keys.Key.resume`).

    `only`: the keys to compare; None: all.

    Returns:
      Whether the run becomes longer.
    """
    old = recorded.read(workdir)
    if old is None:
        raise ConfigError(f"--workdir={workdir} holds no run of mixedres; train one there first")
    new = as_json(config)
    keys = sorted(key for key in old.keys() | new.keys() if _RESUME.get(key) != FREE and (only is None or key in only))
    old = {key: old.get(key, _BEFORE.get(key, _DEFAULTS.get(key))) for key in keys}  # an older version had fewer keys
    changed = [key for key in keys if old[key] != new.get(key)]
    longer = [key for key in changed if _RESUME.get(key) == GROW and _is_more(new.get(key), old[key])]
    differing = [key for key in changed if key not in longer]
    if differing:
        what = listed([f"{key}: {old[key]!r} there, {new.get(key)!r} now" for key in differing], 5, "; ")
        way_out = ", or start over with --clean" if only is None else ""
        raise ConfigError(
            f"--workdir={workdir} holds a run with a different config ({what}); name another --workdir{way_out}"
        )
    return bool(longer)


def check_data(workdir: pathlib.Path, data: dict[str, Any], *, classes_only: bool = False) -> None:
    """Raises `ConfigError` where the run in `workdir` was on other data, and says what differs.

    Args:
      workdir: directory of the run.
      data: 'class_names', 'train_examples', 'eval_examples' and a 'fingerprint' of the examples and their order.
      classes_only: compare only the class names; an evaluation may use other images.
    """
    old = recorded.read_data(workdir)
    same = ("class_names", "train_examples", "eval_examples", "fingerprint")
    if not data or old is None or all(old.get(key) == data.get(key) for key in same):
        return
    there, now = [str(name) for name in old["class_names"]], data["class_names"]
    if there != now:
        new, gone = [name for name in now if name not in there], [name for name in there if name not in now]
        found = [f"{kind}: {', '.join(names[:5])}" for kind, names in (("new", new), ("gone", gone)) if names]
        what = f"{len(there)} classes there, {len(now)} now ({'; '.join(found) or 'in another order'})"
    elif not classes_only:
        counts = [
            f"{held.get('train_examples')} training and {held.get('eval_examples')} test images" for held in (old, data)
        ]
        what = f"{counts[0]} there, {counts[1]} now, or with other names or in another order"
    else:
        return
    raise ConfigError(
        f"--workdir={workdir} holds a run on other data ({what}); put the data back as they were, name another "
        "--workdir, or start over with --clean"
    )


def contents(workdir: pathlib.Path) -> dict[str, Any]:
    """The state of the directory that all processes must agree on: path, whether it was claimed, checkpoints."""
    claimed = (workdir / LOCK).exists()
    return {"directory": str(workdir), "claimed": claimed, "checkpoints": recorded.steps(workdir)}


def read_summary(workdir: pathlib.Path) -> dict[str, Any] | None:
    """The summary of a finished run; None where there is none yet."""
    try:
        found = parse_json(read_regular(workdir / SUMMARY))
        if not isinstance(found, dict):
            raise ValueError
        return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        raise ConfigError(
            f"{workdir / SUMMARY} is not readable as JSON; remove it, or start over with --clean"
        ) from None


def _is_more(new: Any, old: Any) -> bool:
    return isinstance(new, int | float) and isinstance(old, int | float) and new > old
