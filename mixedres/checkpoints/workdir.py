"""The directory of a run: names of its files, what the run recorded, and whether a new start may go on."""

import contextlib
import pathlib
import shlex
from collections.abc import Collection

from ml_collections import ConfigDict

from mixedres._internal.cli import command_line
from mixedres._internal.errors import ConfigError, listed
from mixedres._internal.files import as_json, is_locked, read_json, read_object
from mixedres._internal.formats import check_format, without_stamp
from mixedres._internal.types import Json, Record
from mixedres.checkpoints import folder
from mixedres.checkpoints.documents import DataIdentity, check, read_flat
from mixedres.config import FREE, GROW, KEYS, flatten, unflatten

CONFIG, DATA, CHECKPOINTS = "config.json", "data.json", "checkpoints"
METRICS, SUMMARY, ERRORS, LOCK = "metrics.jsonl", "summary.json", "errors.html", ".lock"
# Directory of a step that was not finite, and its name while it is written.
NONFINITE = ("nonfinite", ".nonfinite")
# The document in that directory, and all of its files.
STEP = "nonfinite.json"
STEP_FILES = (STEP, f"{STEP}.part", "state.npz", "batch.npz")
# Events of TensorBoard, whose names other programs do not give: they end in neither.
EVENTS = "events.out.tfevents.*.mixedres"
# Identity of the run at Weights & Biases, and the directory of wandb's files.
WANDB_ID, WANDB = "wandb.json", "wandb"
# Directory of traces, and a trace in it by its first step. TensorBoard reads traces from plugins/profile alone.
PROFILE, TRACES = "profile", "plugins/profile/from_step_*"
# Files of a trace.
TRACE_FILES = ("*.xplane.pb", "*.trace.json.gz", "perfetto_trace.json.gz")
# Keys that identify a config.json as a run's; other programs write files of this name too.
_MARKS = {"precision.name", "optimizer.decay_mask"}
_RESUME = {key.path: key.resume for key in KEYS}


class RecordedRun:
    """Config, data and checkpoints that a run recorded in its directory; reads, and writes nothing.

    run = RecordedRun(pathlib.Path("runs/digits"))
    print(run.config(), run.steps())
    """

    def __init__(self, path: pathlib.Path):
        """Takes the directory."""
        self.path = path

    def holds_config(self) -> bool:
        """Returns whether the directory holds the config of a run of mixedres, valid or not."""
        return self._config() is not None

    def config(self) -> Record | None:
        """Returns the config of the run, flat, with all of today's keys; None if the directory holds no run.

        Raises ConfigError if a newer version of mixedres wrote the config, or a value is invalid.
        """
        found = self._config()
        return None if found is None else read_flat(found, self.path / CONFIG)

    def data(self) -> Record | None:
        """Returns the identity of the data of the run; None if it is unknown.

        Raises ConfigError if a newer version of mixedres wrote the file, or a part of it is invalid.
        """
        data = read_json(self.path / DATA)
        if not _is_data(data):
            data = self._record().get("data")
        if not _is_data(data):
            return None
        return without_stamp(check(data, DataIdentity, self.path / DATA))

    def steps(self) -> list[int]:
        """Returns the steps of the checkpoints in the directory, whole or damaged, in order."""
        return folder.steps_in(self.path / CHECKPOINTS)

    def step_named(self, name: str) -> int:
        """Returns the step of the checkpoint 'best' or of a number; raises ConfigError if there is none."""
        steps = self.steps()
        step = int(name) if name != "best" else self._best_step(steps)
        if step in steps:
            return int(step)
        there = f"it has {', '.join(map(str, steps))}" if steps else "it has none"
        what = "no evaluation yet that was the best" if step is None else f"no checkpoint of step {step}"
        raise ConfigError(f"{self.path} has {what}; {there}. Write {self.path} for the newest")

    def _best_step(self, steps: list[int]) -> int | None:
        """Returns the step of the best evaluation, of equals that of the newest, which has trained longer."""
        record = self._record()
        best, newest = record.get("best"), record.get("evaluated")
        if best and newest and newest["top1"] >= best["top1"] and newest["step"] in steps:
            best = newest
        return best["step"] if best else None

    def left_to_command_line(self, config: ConfigDict) -> list[str]:
        """Returns a list with one note on recorded settings of the data that act on the machine; empty without any."""
        recorded, now = self.config() or {}, flatten(config)
        left = [key.path for key in KEYS if not key.is_portable and key.path.startswith("data.")]
        flags = [
            f"--config.{path}={shlex.quote(str(recorded[path]))}"
            for path in left
            if now[path] is None and recorded.get(path)
        ]
        if not flags:
            return []
        place = self.path / CONFIG
        command = f"{command_line.typed()} {' '.join(flags)}"
        return [f"note: settings of this machine are not taken from {place}; if you trust them, type: {command}"]

    @staticmethod
    def read_portable_config(path: pathlib.Path) -> ConfigDict:
        """Returns the config of the run in `path`, but for keys that act on this machine; raises ConfigError."""
        config = RecordedRun(path).config()
        if config is None:
            raise ConfigError(f"--workdir={path} holds no run whose config can be read; name the workdir of a run")
        return unflatten(portable(config))

    def in_use(self) -> bool:
        """Returns whether a process holds the lock of the directory."""
        return is_locked(self.path / LOCK)

    def contents(self) -> Record:
        """Returns the state of the directory that all processes must see: path, whether it was claimed, checkpoints."""
        claimed = (self.path / LOCK).exists()
        return {"directory": str(self.path), "claimed": claimed, "checkpoints": self.steps()}

    def summary(self) -> Record | None:
        """Returns the summary of a finished run; None if the run is not finished."""
        try:
            summary = read_object(self.path / SUMMARY)
            check_format(summary, self.path / SUMMARY)
            return without_stamp(summary)
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            raise ConfigError(
                f"{self.path / SUMMARY} is not readable as JSON; remove it, or start over with --clean"
            ) from None

    def finished(self, config: Record) -> Record | None:
        """Returns the summary of a finished run that `config` does not extend; else None."""
        old = self.config()
        if old is None or self.check_same(config):
            return None
        top1, wanted = config.get("stop_at_top1"), old.get("stop_at_top1")
        if wanted is not None and (top1 is None or top1 > wanted):
            return None
        # A run that ended without patience may go on with more; the loop ends it again if the patience is too short.
        has_patience = old.get("patience") and config.get("patience") != old["patience"]
        return None if has_patience else self.summary()

    def check_same(self, config: Record, only: Collection[str] | None = None) -> bool:
        """Checks that `config` may continue the run in the directory, and returns whether the run becomes longer.

        Raises ConfigError if there is no run, or a key (of `only`, if given) differs; the message lists the
        differences.
        """
        old = self.config()
        if old is None:
            raise ConfigError(f"--workdir={self.path} holds no run of mixedres; train one there first")
        new = as_json(config)
        keys = sorted(
            key for key in old.keys() | new.keys() if _RESUME.get(key) != FREE and (only is None or key in only)
        )
        changed = [key for key in keys if old.get(key) != new.get(key)]
        longer = [key for key in changed if _RESUME.get(key) == GROW and _is_more(new.get(key), old[key])]
        differing = [key for key in changed if key not in longer]
        if differing:
            what = listed([f"{key}: {old[key]!r} there, {new.get(key)!r} now" for key in differing], 5, "; ")
            flags = " ".join(f"--config.{key}={_as_text(old[key])}" for key in differing[:5])
            way_out = f"name another --workdir, go on with {flags}, or remove that run with --clean"
            if only is not None:
                way_out = f"add {flags}, or leave out --config to take the config of the run"
            raise ConfigError(f"--workdir={self.path} holds a run with a different config ({what}); {way_out}")
        return bool(longer)

    def check_data(self, data: Record, *, classes_only: bool = False) -> None:
        """Raises ConfigError with the differences if the run was on other data.

        `data`: 'class_names', 'train_examples', 'eval_examples', a 'fingerprint' of the examples and their order, and
        of files a hash 'sizes' of their sizes. `classes_only`: compare only the class names; an evaluation may use
        other images.
        """
        old = self.data()
        same = ("class_names", "train_examples", "eval_examples", "fingerprint")
        if not data or old is None:
            return
        are_same = all(old.get(key) == data.get(key) for key in same)
        if are_same and (
            classes_only or None in (old.get("sizes"), data.get("sizes")) or old["sizes"] == data["sizes"]
        ):
            return
        there, now = [str(name) for name in old["class_names"]], data["class_names"]
        if there != now:
            new, gone = [name for name in now if name not in there], [name for name in there if name not in now]
            changes = [f"{kind}: {', '.join(names[:5])}" for kind, names in (("new", new), ("gone", gone)) if names]
            what = f"{len(there)} classes there, {len(now)} now ({'; '.join(changes) or 'in another order'})"
        elif are_same:
            what = "the same names, but files of other sizes"
        elif not classes_only:
            counts = [
                f"{x.get('train_examples')} training and {x.get('eval_examples')} test images" for x in (old, data)
            ]
            what = f"{counts[0]} there, {counts[1]} now, or with other names or in another order"
        else:
            return
        raise ConfigError(
            f"--workdir={self.path} holds a run on other data ({what}); name another --workdir, put the data back as "
            "they were, or remove that run with --clean"
        )

    def _config(self) -> Record | None:
        """Returns the config as it was recorded; None if the directory holds no run of mixedres."""
        config = read_json(self.path / CONFIG)
        if not _is_config(config):
            config = self._record().get("config")
        return config if _is_config(config) else None

    def _record(self) -> Record:
        """Returns the newest whole record of a checkpoint; {} without one."""
        for step in self.steps()[: -folder.MOST_TRIED - 1 : -1]:
            with contextlib.suppress(OSError, TypeError, KeyError, ValueError):
                record = folder.read_record(self.path / CHECKPOINTS / str(step))
                return record if isinstance(record, dict) else {}
        return {}


def check_holds_step(directory: pathlib.Path) -> None:
    """Raises ConfigError unless the directory of a step that was not finite holds such a step."""
    if not (directory / STEP).exists():
        raise ConfigError(
            f"{directory} holds no step to replay; give the WORKDIR of a run that ended with exit status 3"
        )


def portable(config: Record) -> Record:
    """Returns a recorded flat config without the keys that act on the machine that reads it."""
    kept = {key.path for key in KEYS if key.is_portable}
    return {path: value for path, value in config.items() if path in kept}


def _is_config(value: Json) -> bool:
    return isinstance(value, dict) and value.keys() >= _MARKS


def _is_data(value: Json) -> bool:
    return isinstance(value, dict) and isinstance(value.get("class_names"), list)


def _as_text(value: Json) -> str:
    """Returns a value as it is typed after --config.KEY=."""
    return str(tuple(value)).replace(" ", "") if isinstance(value, list) else str(value)


def _is_more(new: Json, old: Json) -> bool:
    return isinstance(new, int | float) and isinstance(old, int | float) and new > old
