"""Everything that a GPU has to tell, by one command in at most 25 minutes.

python -m experiments.gpu
python -m experiments.gpu --dry_run
python -m experiments.gpu --device=cpu --name=try

In this order: versions and device; numerics on the device (gradients against float64, bits of two runs, histograms,
overflow); time, memory and bandwidth of the step in every preset, with plain and fused norms, at four batch sizes;
PyTorch beside ours; what loss scaling, counting and command buffers
cost; the ten largest kernels; the step fed with JPEGs; the digits by the main command. Each part is a process of its
own with a limit of time; what it leaves goes to the parts after it. What cannot run is named, and the others go on.

Writes experiments/results/gpu_NAME.json after every part (NAME from --name, else the device), so that a run that is cut
off keeps what it has; --parts=... runs some of them again and keeps the rest. At the end a page, gpu_NAME.md, with
pictures, and mixedres/train/fused_is_faster.json, which config.model.fused=auto follows. Traces, the tables that the
parts print and their own results are in --out. --device=cpu takes tiny shapes, to try the command: no number of it
means anything, and nothing outside --out is written.

exit status: 0; 1 if a part failed or was cut off; 2 for a mistake in what was given; 130 interrupted
"""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

from experiments.lib import runs
from experiments.on_gpu import page
from mixedres._internal.cli import command_line, console
from mixedres._internal.errors import ConfigError
from mixedres._internal.files import write_json

MINUTES = 25
BATCHES, TINY_BATCHES = (256, 32, 512, 128), (8,)
PRESETS = "bf16,fp16,tf32,fp32,fp16_rewrite,bf16_rewrite,fp16_static"
# For the tiny form: programs that run a few times, quickly compiled.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
BENCHMARK = "experiments.benchmark"
LARGE_NETWORK = ["--batches=256,32", "--config.model.name=resnet50", "--config.data.image_size=224"]
LARGE_NETWORK += ["--config.data.num_classes=1000"]
TINY_NETWORK = ["--config.model.name=cifar_resnet8", "--config.data.image_size=16", "--config.data.num_classes=10"]


@dataclasses.dataclass(frozen=True)
class Part:
    """A process that measures something."""

    name: str  # its key among the results
    minutes: float  # its limit on a GPU
    what: str  # what it measures, in a few words
    module: str
    arguments: tuple[str, ...] = ()
    wants_seconds: bool = False  # whether it takes its limit as --seconds

    @property
    def file(self) -> str:
        """Of its result, in the folder of the parts."""
        if self.is_own:
            return f"{self.name}.json"
        kinds = [kind for kind in ("versus", "costs") if f"--{kind}" in self.arguments]
        return f"{[*kinds, 'benchmark'][0]}_{self.name}.json"

    @property
    def is_own(self) -> bool:
        """Whether it is a part of `experiments.on_gpu`, and no other command."""
        return self.module == "experiments.on_gpu"

    def command(self, out: pathlib.Path, seconds: float) -> list[str]:
        """The command line of the process."""
        where = [f"--out={out / self.file}"] if self.is_own else [f"--name={self.name}"]
        limit = [f"--seconds={max(1, int(seconds))}"] if self.wants_seconds else []
        return [sys.executable, "-m", self.module, *self.arguments, *where, *limit]


def parts(options: argparse.Namespace) -> list[Part]:
    """All parts, in their order."""
    tiny = options.device == "cpu"
    flag = ("--tiny",) if tiny else ()

    def own(name: str, minutes: float, what: str) -> Part:
        return Part(name, minutes, what, "experiments.on_gpu", (name, *flag))

    small = ("--models=cifar_resnet8", "--image_size=16", "--num_classes=10", "--batch=8", "--dtypes=fp32", "--steps=1")
    peers = (*small, "--rounds=1", "--loss_steps=1") if tiny else ("--rounds=5", "--steps=5")
    costs = ("--rounds=2", "--batches=8", *TINY_NETWORK) if tiny else ("--rounds=11", "--steps=5", *LARGE_NETWORK)
    return [
        own("device", 0.5, "versions and device"),
        own("numerics", 3, "numerics on the device against float64, numpy and itself"),
        *(steps(batch, tiny=tiny) for batch in (TINY_BATCHES if tiny else BATCHES)),
        Part("versus", 4, "PyTorch beside ours", BENCHMARK, ("--versus", *peers)),
        Part("costs", 2, "loss scaling, counting, command buffers", BENCHMARK, ("--costs", *costs)),
        own("kernels", 1.5, "the ten largest kernels"),
        own("pipeline", 1.5, "the step fed with JPEGs"),
        own("digits", 1, "digits by the main command"),
    ]


def steps(batch: int, *, tiny: bool) -> Part:
    """The benchmark of all presets at one batch size."""
    what = f"the step of every preset, plain and fused, {batch} images"
    given = ["--norms=plain,fused", f"--config.batch_size={batch}", "--config.num_devices=1"]
    if tiny:
        given += ["--presets=fp32,fp16", "--rounds=2", "--steps=1", "--compile_jobs=2", *TINY_NETWORK]
    else:
        jobs = max(4, (os.cpu_count() or 1) // 2)
        given += [f"--presets={PRESETS}", "--rounds=5", "--steps=5", f"--compile_jobs={jobs}"]
    minutes = {256: 4.0, 32: 2.5, 512: 3.0, 128: 2.0}.get(batch, 1.0)
    return Part(f"steps_{batch}", minutes, what, BENCHMARK, tuple(given), wants_seconds=True)


class Report:
    """The file of results, written after every part."""

    def __init__(self, path: pathlib.Path, *, keep: bool):
        """Starts a new document, or with `keep` goes on with the one at `path` where there is one."""
        self.path, self.problem = path, ""
        self.document: dict[str, Any] = {"parts": {}, "failed": {}}
        if keep and path.exists():
            try:
                self.document |= json.loads(path.read_text())
            except ValueError:
                raise ConfigError(f"{path} is no result of this command; move it away") from None

    def add(self, name: str, result: dict[str, Any] | None, problem: str) -> None:
        """Enters what a part came to, and writes; a disk that is full is told, and tried again with the next part."""
        self.document["parts"].pop(name, None), self.document["failed"].pop(name, None)
        if result is not None:
            self.document["parts"][name] = result
        if problem:
            self.document["failed"][name] = problem
        self.document.setdefault("command", runs.command())
        self.document["date"] = datetime.date.today().isoformat()
        try:
            write_json(self.path, self.document)
            self.problem = ""
        except OSError as error:
            self.problem = f"{self.path} cannot be written ({error.strerror}); make room"
            print(f"gpu: {self.problem}", file=sys.stderr, flush=True)


def take(part: Part, out: pathlib.Path, seconds: float, environment: dict[str, str]) -> tuple[dict | None, str]:
    """(its result, what went wrong) of a part; what it prints goes to a file."""
    path, log = out / part.file, out / f"{part.name}.log"
    try:
        path.unlink(missing_ok=True)
        with log.open("wb") as file:
            process = subprocess.Popen(
                part.command(out, seconds), env=environment, stdout=file, stderr=file, start_new_session=True
            )
            try:
                status = process.wait(seconds)
            except BaseException as error:  # its children too: compilers of PyTorch
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                status = None
    except OSError as error:
        return None, f"{out} cannot be written ({error.strerror}); make room"
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError):
        result = None
    if status is None:
        return result, f"cut off after {seconds:.0f} s; {log}"
    if result is None or status:
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
        return result, f"exit status {status}: {' '.join(last)[:300]}; {log}"
    return result, ""


def run(chosen: list[Part], report: Report, out: pathlib.Path, minutes: float, environment: dict[str, str]) -> None:
    """Takes the parts one after the other; time that one leaves is for those after it."""
    until = time.monotonic() + 60 * minutes
    for index, part in enumerate(chosen):
        # Those that follow keep what they need where something is left for them.
        later = sum(60 * other.minutes for other in chosen[index + 1 :])
        seconds = max(60 * part.minutes * minutes / MINUTES, until - time.monotonic() - later)
        seconds = min(seconds, until - time.monotonic())
        if seconds <= 0:
            report.add(part.name, None, f"not reached in {minutes:g} minutes")
            continue
        print(f"{part.name}: {part.what} ...", flush=True)
        began = time.monotonic()
        result, problem = take(part, out, seconds, environment)
        report.add(part.name, result, problem)
        print(f"{part.name}: {problem or 'done'} ({time.monotonic() - began:.0f} s)", flush=True)


def find_device(options: argparse.Namespace, out: pathlib.Path, environment: dict[str, str]) -> dict[str, Any]:
    """What JAX computes on, told by a process of its own; raises ConfigError if it is not what was asked for."""
    result, problem = take(parts(options)[0], out, 300, environment)
    if result is None:
        raise ConfigError(f"JAX does not start here: {problem}")
    platform = result["device"]["platform"]
    if options.device == "gpu" and platform != "gpu":
        raise ConfigError(
            f"JAX has no GPU here, but {platform}; pip install -e '.[cuda13]' on a machine with one, or try the "
            "command with --device=cpu --name=try"
        )
    return result


def parse(argv: list[str]) -> argparse.Namespace:
    """The options; raises ConfigError for a mistake."""
    parser = runs.parser("gpu", __doc__)
    parser.add_argument("--device", default="gpu", choices=("gpu", "cpu"), help="default gpu; cpu: the tiny form")
    parser.add_argument("--name", help="of the files of results (default: the device)")
    parser.add_argument("--parts", help="comma-separated (default: all)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"of all parts together (default {MINUTES})")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/gpu"), help="default runs/gpu")
    parser.add_argument("--dry_run", action="store_true", help="list the parts and their minutes, and start none")
    options = parser.parse_args(argv)
    if not 0 < options.minutes < float("inf"):
        raise ConfigError(f"--minutes={options.minutes:g} must be > 0")
    known = [part.name for part in parts(options)]
    options.parts = runs.names("parts", options.parts) if options.parts is not None else known
    unknown = [name for name in options.parts if name not in known]
    if unknown:
        raise ConfigError(f"--parts={unknown[0]} is not known; use {', '.join(known)}")
    return options


def main(argv: list[str]) -> int:
    """Runs the parts and writes the page; returns the exit status."""
    try:
        options = parse(argv)
        chosen = [part for part in parts(options) if part.name in options.parts]
        if options.dry_run:
            lines = [f"{part.minutes:5.1f} min  {part.name:<10} {part.what}" for part in chosen]
            lines.append(f"{sum(part.minutes for part in chosen):5.1f} min  in all, at most")
            return command_line.run("gpu", lambda _: console.show(*lines), ())
        tiny = options.device == "cpu"
        out = options.out.absolute()
        out.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"EXPERIMENTS_RESULTS": str(out), "JAX_COMPILATION_CACHE_DIR": str(out / "compiled")}
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK} if tiny else {}
        device = find_device(options, out, environment)
        name = options.name or runs.slug(device["device"]["kind"])
        partly = len(chosen) < len(parts(options))
        report = Report((out if tiny else runs.RESULTS) / f"gpu_{name}.json", keep=partly)
    except OSError as error:
        print(f"gpu: --out={options.out} cannot be written ({error.strerror}); name another", file=sys.stderr)
        return 2
    except ConfigError as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2
    if not device["bandwidth_is_known"] and not tiny:
        kind = device["device"]["kind"]
        print(f"note: {kind} is not in experiments/lib/gpus.py: no share of its bandwidth will be told", flush=True)
    report.document |= {"device": device["device"], "versions": device["versions"]}
    report.add("device", device, "")
    try:
        run([part for part in chosen if part.name != "device"], report, out, options.minutes, environment)
    except KeyboardInterrupt:
        print(f"gpu: interrupted; {report.path} has the parts before", file=sys.stderr)
        return 130
    try:
        written = page.write(report.document, report.path.with_suffix(""))
        measured = None if tiny else page.remember(report.document)
    except OSError as error:
        print(f"gpu: the page cannot be written ({error.strerror}); make room", file=sys.stderr)
        return 1
    for part, problem in report.document["failed"].items():
        print(f"gpu: {part}: {problem}", file=sys.stderr)
    print("\n".join(map(str, filter(None, [report.path, written, measured]))))
    return int(bool(report.document["failed"] or report.problem))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
