"""Whole commands on the directory of a run of which one field was changed, with every checksum right again."""

import json
import os
import shutil
import sys
import zlib

import jax

from mixedres import main, replay
from mixedres._internal.cli import console
from mixedres.doctor import __main__ as doctor
from mixedres.export import __main__ as export
from mixedres.export import __main__ as export_command
from mixedres.predict import __main__ as predict
from tests.checkpoints import old_runs
from tests.data import made
from tests.fuzz import contents, hostile_json
from tests.fuzz.blind import pick

RUN, STEP = "run/", f"run/checkpoints/{old_runs.STEPS}/default/"
# The documents of a run; the record of its checkpoint is inside _METADATA.
DOCUMENTS = (f"{RUN}config.json", f"{RUN}data.json", f"{RUN}nonfinite/nonfinite.json", f"{RUN}summary.json")
METADATA, CHECKSUMS = f"{STEP}_METADATA", f"{STEP}checksums.json"


def make(place):
    """Writes the corpus: a run of today's format, its images, and one image to classify."""
    folder, today = place / "workdir", old_runs.RUNS / old_runs.TODAY
    files = {p.relative_to(today).as_posix(): p.read_bytes() for p in today.rglob("*") if p.is_file()}
    made.write_files(folder, files)
    old_runs.images(folder / "images")


def mutant(rng, files):
    """Returns changes of one document, of which one field differs; a checkpoint gets the checksums that are right."""
    name = pick(rng, (*DOCUMENTS, METADATA, METADATA))
    if name != METADATA:
        return {name: hostile_json.changed(rng, json.loads(files[name]))}
    metadata = json.loads(files[METADATA])
    record = hostile_json.changed(rng, json.loads(metadata["custom_metadata"]["record"]))
    metadata["custom_metadata"]["record"] = record.decode()
    changes = {METADATA: json.dumps(metadata).encode()}
    return changes | {CHECKSUMS: contents.checksums(files | changes, STEP)}


def targets(corpus):
    """Returns the targets: `convert`, and one of the other commands, chosen by the contents of the documents."""
    complain = console.complain  # a note on the standard error output is no error
    console.complain = lambda line: (console.say if line.startswith("note: ") else complain)(line)
    images, written = corpus / "workdir" / "images", _record_writes()
    picture, here = images / old_runs.CLASSES[0] / "0.png", f"--config.data.dir={images}"

    def others(place):
        run, out = place / "run", place / "out"
        return (
            lambda: main.train_or_evaluate(["--mode=eval", f"--workdir={run}", here]),
            lambda: predict.predict_images([f"--from={run}", str(picture)]),
            lambda: export.export_network([f"--from={run}", f"--to={out}/exported"]),
            lambda: doctor.examine_numerics([f"--workdir={run}", here, f"--out={out}/doctor.html"]),
            lambda: replay.replay_step([str(run), here]),
        )

    def inside(place, command):
        """Calls a command, which must write below `place`/out alone."""
        out = place / "out"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        written.clear()
        try:
            command(place)
        finally:
            allowed = (str(out), os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(out), os.devnull)
            wrong = [path for path in written if not os.path.realpath(path).startswith(allowed)]
            jax.clear_caches()  # the programs of a thousand mutants would fill the memory
            assert not wrong, f"written elsewhere: {wrong}"

    def one_other(place):
        number = zlib.crc32(b"".join((place / name).read_bytes() for name in (*DOCUMENTS, METADATA)))
        others(place)[number % 5]()

    def converted(place):
        export_command.export_network([f"--from={place / 'run'}", f"--to={place / 'out' / 'weights.safetensors'}"])

    return [lambda place: inside(place, converted), lambda place: inside(place, one_other)]


def _record_writes():
    """Returns a list that gets every path that Python opens for writing, makes, moves or removes from now on."""
    written = []

    def hook(event, arguments):
        if event == "open" and isinstance(arguments[0], str) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            written.append(arguments[0])
        elif event in ("os.mkdir", "os.remove", "os.rmdir", "os.rename", "os.symlink", "shutil.rmtree"):
            written.append(os.fspath(arguments[0]))

    sys.addaudithook(hook)
    return written
