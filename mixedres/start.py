"""Where a run or an evaluation starts: at random or given weights, or at its newest checkpoint."""

from __future__ import annotations

import pathlib
from typing import Any

import jax

from mixedres import step, workdir
from mixedres.checkpoints import Checkpoints, OtherModelError
from mixedres.config import ConfigError
from mixedres.initial import Initial
from mixedres.numerics import once
from mixedres.processes import Processes
from mixedres.setup import Setup


def agree(setup: Setup, directory: pathlib.Path, group: Processes, *, clean: bool = False) -> None:
    """Raises `ConfigError` in all processes where one has another config, other data or another directory."""
    group.agree("config", setup.resolved | {"--clean": clean})
    counts = ("train_examples", "eval_examples", "fingerprint")
    group.agree("data", {name: setup.data[name] for name in counts})
    group.agree("workdir", workdir.contents(directory))


def fresh(setup: Setup, initial: Initial | None = None) -> step.TrainState:
    """The state before the first step, on the devices: random, or with the weights `initial`, which it tells of."""
    # Random initialisation is a large program that runs once: on the CPU most of its time is optimisation.
    quick = once.options(setup.devices[0].platform)
    init = jax.jit(setup.init_state, out_shardings=setup.replicated, compiler_options=quick)
    if initial is None:
        return setup.placed(init())
    print(initial.note)
    return setup.placed(initial.into(init(), setup.replicated))


def restored(
    setup: Setup, saved: Checkpoints, *, set_aside: bool = False
) -> tuple[step.TrainState, dict[str, Any]] | None:
    """The newest state that is whole, and its record; None where there is no checkpoint.

    Says which newer ones are damaged, and with `set_aside` renames these.

    Raises:
      ConfigError: where none is whole, or they are of another network or beyond the end of the run.
    """
    latest = saved.latest_step()
    if latest is None:
        return None
    if latest > setup.total_steps:
        raise ConfigError(f"the newest checkpoint is of step {latest}, beyond the {setup.total_steps} of this config")
    shapes = jax.eval_shape(setup.init_state)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=setup.replicated), shapes)
    try:
        state, record, damaged = saved.restore_newest(like)
    except OSError as error:
        raise ConfigError(
            f"{error}; nothing was changed. Put back a copy of one, or start over with --clean"
        ) from error
    except OtherModelError as error:
        raise ConfigError(
            f"{error}; nothing was changed. Put back the right ones, or name another --workdir"
        ) from error
    if damaged:
        print(f"warning: no checkpoint of step {', '.join(map(str, damaged))} is whole; taking step {int(state.step)}")
        if set_aside:
            saved.set_aside(damaged)
    if set_aside:
        _note_changes(setup, record)
    return setup.placed(state), record


def newest(setup: Setup, directory: pathlib.Path) -> step.TrainState | None:
    """The newest state that is whole in the workdir `directory`, which stays as it is; None where it has none.

    Raises:
      ConfigError: as `restored`.
    """
    saved = Checkpoints((directory / workdir.CHECKPOINTS).absolute())
    try:
        found = restored(setup, saved)
    finally:
        saved.close()
    return found and found[0]


def _note_changes(setup: Setup, record: dict[str, Any]) -> None:
    """Says which of the changes that a continued run may have touches its numbers."""
    before, now = record["devices"], len(setup.devices)
    if before != now and not setup.config.batch_norm.sync:
        print(
            f"note: {before} devices before, {now} now: batch norm takes its statistics over "
            f"{setup.batch_size // now} images, so the numbers are not those of an undisturbed run"
        )
    if any(record["config"].get(key) != setup.resolved[key] for key in ("epochs", "steps")):
        print(f"note: the run has become longer; its learning rate is that of {setup.total_steps:,} steps from now on")
