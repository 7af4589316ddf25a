"""The directory of a run: names of its files, and checks whether a new start may continue the run."""

import pathlib
from collections.abc import Collection

from mixedres._internal.errors import ConfigError, listed
from mixedres._internal.files import as_json, is_locked, read_object
from mixedres._internal.formats import check_format, without_stamp
from mixedres._internal.types import Json, Record
from mixedres.checkpoints.recorded import CHECKPOINTS as CHECKPOINTS
from mixedres.checkpoints.recorded import CONFIG as CONFIG
from mixedres.checkpoints.recorded import DATA as DATA
from mixedres.checkpoints.recorded import checkpoint_steps, read_config, read_data_identity
from mixedres.config import FREE, GROW, KEYS

METRICS, SUMMARY, ERRORS, LOCK = "metrics.jsonl", "summary.json", "errors.html", ".lock"
# Directory of a step that was not finite, and its name while it is written.
NONFINITE = ("nonfinite", ".nonfinite")
# The document in that directory.
STEP = "nonfinite.json"
EVENTS = "events.out.tfevents.*"
# Identity of the run at Weights & Biases, and the directory of wandb's files.
WANDB_ID, WANDB = "wandb.json", "wandb"
# Directory of traces, and a trace in it by its first step. TensorBoard reads traces from plugins/profile alone.
PROFILE, TRACES = "profile", "plugins/profile/from_step_*"
_RESUME = {key.path: key.resume for key in KEYS}


def check_holds_step(directory: pathlib.Path) -> None:
    """Raises ConfigError unless the directory of a step that was not finite holds such a step."""
    if not (directory / STEP).exists():
        raise ConfigError(
            f"{directory} holds no step to replay; give the WORKDIR of a run that ended with exit status 3"
        )


def in_use(workdir: pathlib.Path) -> bool:
    """Returns whether a process holds the lock of `workdir`."""
    return is_locked(workdir / LOCK)


def finished(workdir: pathlib.Path, config: Record) -> Record | None:
    """Returns the summary of a finished run that `config` does not extend; else None.

    Args:
      workdir: directory of the run, claimed with `config`.
      config: config of this start, flat.
    """
    old = read_config(workdir)
    if old is None or check_same(workdir, config):
        return None
    top1, wanted = config.get("stop_at_top1"), old.get("stop_at_top1")
    if wanted is not None and (top1 is None or top1 > wanted):
        return None
    # A run that ended without patience may go on with more; the loop ends it again if the patience is too short.
    has_patience = old.get("patience") and config.get("patience") != old["patience"]
    return None if has_patience else read_summary(workdir)


def check_same(workdir: pathlib.Path, config: Record, only: Collection[str] | None = None) -> bool:
    """Checks that `config` may continue the run in `workdir`, and returns whether the run becomes longer.

    The `resume` of a `mixedres.config.Key` says whether the key may change.

    Args:
      workdir: directory of the run.
      config: config of this start, flat.
      only: the keys to compare; None: all keys.

    Raises:
      ConfigError: if there is no run, or a key differs; the message lists the differences.
    """
    old = read_config(workdir)
    if old is None:
        raise ConfigError(f"--workdir={workdir} holds no run of mixedres; train one there first")
    new = as_json(config)
    keys = sorted(key for key in old.keys() | new.keys() if _RESUME.get(key) != FREE and (only is None or key in only))
    changed = [key for key in keys if old.get(key) != new.get(key)]
    longer = [key for key in changed if _RESUME.get(key) == GROW and _is_more(new.get(key), old[key])]
    differing = [key for key in changed if key not in longer]
    if differing:
        what = listed([f"{key}: {old[key]!r} there, {new.get(key)!r} now" for key in differing], 5, "; ")
        flags = " ".join(f"--config.{key}={_as_text(old[key])}" for key in differing[:5])
        way_out = f"name another --workdir, go on with {flags}, or remove that run with --clean"
        if only is not None:
            way_out = f"add {flags}, or leave out --config to take the config of the run"
        raise ConfigError(f"--workdir={workdir} holds a run with a different config ({what}); {way_out}")
    return bool(longer)


def check_data(workdir: pathlib.Path, data: Record, *, classes_only: bool = False) -> None:
    """Raises ConfigError with the differences if the run in `workdir` was on other data.

    Args:
      workdir: directory of the run.
      data: 'class_names', 'train_examples', 'eval_examples', a 'fingerprint' of the examples and their order, and if
        the examples are files, a hash 'sizes' of their sizes. Runs of older versions recorded no 'sizes'.
      classes_only: compare only the class names; an evaluation may use other images.
    """
    old = read_data_identity(workdir)
    same = ("class_names", "train_examples", "eval_examples", "fingerprint")
    if not data or old is None:
        return
    are_same = all(old.get(key) == data.get(key) for key in same)
    if are_same and (classes_only or None in (old.get("sizes"), data.get("sizes")) or old["sizes"] == data["sizes"]):
        return
    there, now = [str(name) for name in old["class_names"]], data["class_names"]
    if there != now:
        new, gone = [name for name in now if name not in there], [name for name in there if name not in now]
        changes = [f"{kind}: {', '.join(names[:5])}" for kind, names in (("new", new), ("gone", gone)) if names]
        what = f"{len(there)} classes there, {len(now)} now ({'; '.join(changes) or 'in another order'})"
    elif are_same:
        what = "the same names, but files of other sizes"
    elif not classes_only:
        counts = [f"{x.get('train_examples')} training and {x.get('eval_examples')} test images" for x in (old, data)]
        what = f"{counts[0]} there, {counts[1]} now, or with other names or in another order"
    else:
        return
    raise ConfigError(
        f"--workdir={workdir} holds a run on other data ({what}); name another --workdir, put the data back as "
        "they were, or remove that run with --clean"
    )


def contents(workdir: pathlib.Path) -> Record:
    """Returns the state of the directory that all processes must see: path, whether it was claimed, checkpoints."""
    claimed = (workdir / LOCK).exists()
    return {"directory": str(workdir), "claimed": claimed, "checkpoints": checkpoint_steps(workdir)}


def read_summary(workdir: pathlib.Path) -> Record | None:
    """Returns the summary of a finished run; None if the run is not finished."""
    try:
        summary = read_object(workdir / SUMMARY)
        check_format(summary, workdir / SUMMARY)
        return without_stamp(summary)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        raise ConfigError(
            f"{workdir / SUMMARY} is not readable as JSON; remove it, or start over with --clean"
        ) from None


def _as_text(value: Json) -> str:
    """Returns a value as it is typed after --config.KEY=."""
    return str(tuple(value)).replace(" ", "") if isinstance(value, list) else str(value)


def _is_more(new: Json, old: Json) -> bool:
    return isinstance(new, int | float) and isinstance(old, int | float) and new > old
