"""The command that repeats a step whose numbers were not finite."""

import pathlib
from collections.abc import Sequence

from mixedres._internal.cli import command_line, console, process
from mixedres._internal.errors import ConfigError
from mixedres._internal.names import PRESETS
from mixedres._internal.types import Record

DESCRIPTION = """\
Repeats the step at which a run ended with exit status 3, with every array of its forward and backward pass examined.

  python -m mixedres.replay runs/imagenet-fp16
  python -m mixedres.replay runs/imagenet-fp16 --precision=bf16 --config.data.dir=/data

The step is in WORKDIR/nonfinite; nothing is written but compiled programs. The replay needs the data set and as many
devices as the run had. Only --config.KEY=VALUE sets keys that act on this machine, such as data.dir.
exit status: 0 replayed, whatever was found; 1 the replay failed; 2 a mistake in the command; 130 interrupted
"""


def replay_step(given: Sequence[str]) -> None:
    """Runs the command with these arguments: repeats the step that a workdir holds, and prints the result."""
    workdir, preset, rest = parse(given)
    # Imported here, and JAX and the models later still, so that a mistake in the command need not wait for them.
    from mixedres.checkpoints import portable
    from mixedres.checkpoints import workdir as names

    names.check_holds_step(workdir / names.NONFINITE[0])
    from mixedres._internal.cli.compilation import compilation_cache
    from mixedres.config import override_machine, unflatten
    from mixedres.train import diagnosis, nonfinite, plan

    saved = nonfinite.load_step(workdir / nonfinite.DIRECTORY)
    config = unflatten(in_preset(portable(saved.config), preset))
    override_machine(config, rest)
    experiment = plan(config).experiment
    with compilation_cache(config.compilation_cache):
        state = nonfinite.restore_state(experiment, saved)
        console.say(
            f"step {saved.step} of {workdir}, {experiment.config.model.name} in {experiment.precision.name} at loss "
            f"scale {float(state.loss_scale.loss_scale):g}; examining ..."
        )
        finding = nonfinite.examine_step(experiment, state, saved.batch)
    if finding.origin is None and preset not in (None, saved.config["precision.name"]):
        console.show(
            f"in {preset} the loss and every gradient of this step are finite; set config.precision.name={preset}"
        )
        return
    for line in diagnosis.products_before(finding):
        console.show(f"  {line}")
    console.show(diagnosis.location(finding, len(experiment.devices)))
    console.show(diagnosis.cause(finding, experiment.precision, state.loss_scale))
    if finding.nonfinite_results:
        console.show(f"not finite at the end of the step: {len(finding.nonfinite_results)} of loss and gradients")


def parse(given: Sequence[str]) -> tuple[pathlib.Path, str | None, list[str]]:
    """Returns (workdir, preset or None, other arguments); raises ConfigError for a mistake in the arguments."""
    parser = command_line.Parser("python -m mixedres.replay", DESCRIPTION)
    parser.add_argument("workdir", metavar="WORKDIR", help="directory of the run")
    parser.add_argument("--precision", choices=PRESETS, help="repeat the step in another preset")
    options, rest = parser.parse_known_args(list(given))
    if wrong := [argument for argument in rest if not argument.startswith("--config.")]:
        parser.error(f"unrecognized arguments: {wrong[0]}")
    if not options.workdir:
        raise ConfigError("WORKDIR is empty; try python -m mixedres.replay runs/digits-fp16")
    return command_line.path(options.workdir).absolute(), options.precision, rest


def in_preset(config: Record, preset: str | None) -> Record:
    """Returns the flat config with another preset, its policies and its loss scale; norms stay fused if possible."""
    from mixedres import precision

    if preset is None:
        return config
    kept = {key: value for key, value in config.items() if not key.startswith("precision.")}
    fused = config.get("model.fused", "auto")
    if fused == "true" and precision.get(preset).why_not_fusable:
        fused = "false"
    return kept | {"precision.name": preset, "model.fused": fused}


def main(argv: Sequence[str]) -> int:
    """Runs the command line, `argv[0]` being the program; returns the exit status, which `DESCRIPTION` explains."""
    return command_line.run("mixedres.replay", replay_step, argv[1:])


if __name__ == "__main__":
    process.start(main)
