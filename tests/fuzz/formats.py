"""The intact files that mutations start from, small and made on the spot, and what commands call on them."""

import argparse
import contextlib
import fnmatch
import gc
import io
import json
import shutil
import tarfile
import time
import zlib

import numpy as np
from PIL import Image, ImageCms

from mixedres import data, main, replay
from mixedres._internal.cli import console
from mixedres._internal.errors import ConfigError, DataError, NonFiniteError, config_errors
from mixedres._internal.files import checksums_hold
from mixedres._internal.formats import without_stamp
from mixedres.checkpoints import RecordedRun, RunDirectory, load, workdir
from mixedres.checkpoints.manager import Checkpoints
from mixedres.data.datasets.folder import ImageFolder
from mixedres.data.images import chunks, crops, preprocessing
from mixedres.doctor import __main__ as doctor
from mixedres.export import __main__ as export
from mixedres.predict import __main__ as predict
from mixedres.predict.classifier import read_classifier
from mixedres.train import fit, start, steps
from mixedres.train.metrics.writers import MetricWriter
from tests.data import made
from tests.fuzz import mutations
from tests.fuzz.mutations import PARTS, chance, pick
from tests.train import run_cases
from tests.train.run_cases import build

SIZE = 24
STEP = "checkpoints/2/default/"
DOCUMENTS = ("config.json", "data.json", "summary.json", "nonfinite/nonfinite.json")


def make(place):
    """Writes a folder of intact files for each format; a mutant of an image or of weights is named mutant."""
    photo = made.photo(40, 56)
    gray = Image.fromarray(photo).convert("L")
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    exif = Image.Exif()
    exif.update({0x0112: 6, 0x010F: "a camera", 0x8769: {0x9000: b"0230"}, 0x8825: {1: "N", 2: (1.0, 2.0, 3.0)}})
    beside = {"exif": exif, "icc_profile": profile}
    frames = {"save_all": True, "append_images": [gray.rotate(90)]}
    images = {
        "jpeg": [{}, {"mode": "L"}, {"mode": "CMYK"}, {"progressive": True}, {"comment": b"text", **beside}],
        "png": [{}, {"mode": "RGBA"}, {"mode": "1"}, {"mode": "P", "transparency": 3}, beside],
    }
    for kind, options in images.items():
        files = [made.encoded(photo, kind.upper(), **option) for option in options]
        files.append(made.encoded(gray, {"jpeg": "MPO", "png": "PNG"}[kind], **frames))
        names = ("mutant", *range(1, len(files)))
        made.write_files(place / kind, {f"{name}.{kind}": file for name, file in zip(names, files, strict=True)})
    made.write_files(place, {"cifar/cifar-10-binary.tar.gz": _cifar()})
    for kind in ("tfrecord", "array_record"):
        held = {"train": made.examples(4), "validation": made.examples(2)}
        made.prepare(place / kind, "toy", held, file_format=kind, shards=1)
    made.write_folder(place / "images", count=24)
    made.write_folder(place / "images", count=9, part="val")
    fit(config(place), place / "run")
    with contextlib.suppress(NonFiniteError):
        fit(config(place, precision__loss_scale=1e38, max_consecutive_skips=1), place / "halted")
    shutil.move(place / "halted" / "nonfinite", place / "run")
    (place / "safetensors").mkdir()
    for layout, name in (("torchvision", "first"), ("transformers", "second"), ("mixedres", "mutant")):
        target = place / "safetensors" / f"{name}.safetensors"
        export.export_network([f"--from={place / 'run'}", f"--to={target}", f"--layout={layout}"])


def config(place, **more):
    """Returns the config of a run of two steps on the images."""
    own = {"name": "folder", "dir": place / "images", "image_size": SIZE, "num_classes": None, "train_examples": None}
    short = {"steps": 2, "batch_size": 8, "num_devices": 1, "eval_every": 0, "checkpoint_every": 0}
    return run_cases.tiny("fp16", model__version="1", **{f"data__{k}": v for k, v in own.items()}, **short | more)


def _cifar():
    """Returns the binary archive of CIFAR-10, with one image a file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", format=tarfile.USTAR_FORMAT) as archive:
        for label, name in enumerate([*(f"data_batch_{index}" for index in range(1, 6)), "test_batch"]):
            record = bytes([label]) + made.photo(32, 32, seed=label).transpose(2, 0, 1).tobytes()
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            member.size = len(record)
            archive.addfile(member, io.BytesIO(record))
    return buffer.getvalue()


def read_image(place):
    """Reads an image as `mixedres.predict`, training and evaluation do; its size chooses how."""
    (path,) = place.glob("mutant.*")
    size = path.stat().st_size
    chosen = preprocessing.get_preprocessing(("official", "official_fast", "torch")[size % 3])
    channels = 1 + 2 * (size // 3 % 2)
    images = ImageFolder("images, train", place, [path.name], np.zeros(1, np.int32))
    reader = chunks.ImageReader(images, (SIZE, SIZE, channels), chosen, 1, bool(size // 6 % 2), "raise")
    chunks.TrainChunks(reader, 1, range(1), 0, seed=size, flip=True)[0]
    chunks.EvalChunks(reader, 1, range(1))[0]
    for found in crops.center_crops([path], chosen.input_spec(SIZE, channels), 1):
        if isinstance(found, str):
            raise ConfigError(f"{path}: {found}")


def read_cifar(place):
    with config_errors("config.data"):
        data.load("cifar10", dir=str(place), image_size=32, batch_size=1)


def read_records(place):
    """Loads the data set as `mixedres.main` does, and reads every image; those that are skipped are printed."""
    with config_errors("config.data"):
        source = data.load("tfds:toy", dir=str(place), image_size=SIZE, batch_size=1, on_error="skip")
        source.fingerprint  # noqa: B018  (it reads records)
    unreadable = {}
    for part in (source.data_set.train, source.data_set.eval):
        reader = chunks.ImageReader(part, source.image_shape, source.preprocessing, 3, False, "skip")
        if len(part):
            unreadable |= chunks.EvalChunks(reader, len(part), range(len(part)))[0]["unreadable"]
    if unreadable:
        console.say(repr(unreadable))
        raise DataError(f"{len(unreadable)} images cannot be used")


def classify(path):
    """Makes the classifier as `mixedres.predict` does, and prints the classes."""
    options = dict.fromkeys(("labels", "precision", "image_size", "preprocessing"))
    chosen = read_classifier(argparse.Namespace(source=str(path), **options))
    for text in (*chosen.notes, *chosen.class_names):
        console.say(f"note: {text}")


def write_metrics(place):
    writer = MetricWriter(place / workdir.METRICS, 1, evaluated=False)
    writer.write(2, "train", {"loss": 1.0})
    writer.close()


def targets(corpus):
    """Returns {format: the functions of the folder of a mutant}; each ends as its command would."""
    experiment, run = build(config(corpus)), corpus / "run"
    shapes = steps.variable_shapes(experiment)
    known, of_data = (without_stamp(json.loads((run / name).read_text())) for name in (workdir.CONFIG, workdir.DATA))

    def initialize(place):
        path = str(place / "mutant.safetensors")
        console.say(start.load_weights(path, shapes, experiment.model, experiment.source.input_spec).note)

    def resume(place):
        with RunDirectory(place).claim(known, clean=False, data=of_data):
            RecordedRun(place).finished(known)

    def restore(place):
        """Reads a checkpoint with right checksums as resuming and as `mixedres.predict` does."""
        if not checksums_hold(place / STEP):
            raise ConfigError("the checkpoint is not whole")
        load.read_weights(place)
        with contextlib.closing(Checkpoints(place / workdir.CHECKPOINTS)) as saved:
            start.restore_newest(experiment, saved)

    def end(place):
        """Waits as a process does at its end: what Orbax left half read must not print."""
        time.sleep(0.01)
        gc.collect()

    def begin(place):
        found = RecordedRun.read_portable_config(place)
        found.data.dir = str(corpus / "images")
        build(found)

    return {
        "jpeg": [read_image],
        "png": [read_image],
        "safetensors": [initialize, lambda place: classify(place / "mutant.safetensors")],
        "tfrecord": [read_records],
        "array_record": [read_records],
        "cifar": [read_cifar],
        "metrics": [write_metrics],
        "data": [resume, lambda place: RecordedRun(place).check_data(of_data, classes_only=True), classify],
        "config": [resume, begin],
        "checkpoint": [restore, end],
        "workdir": [lambda place: _command(place, corpus / "images")],
    }


def _command(place, images):
    """Calls one of the commands on a run, chosen by the contents of its documents."""
    out, here = place / "out", f"--config.data.dir={images}"
    out.mkdir()
    picture = str(next(images.rglob("*.jpg")))
    commands = (
        lambda: main.train_or_evaluate(["--mode=eval", f"--workdir={place}", here]),
        lambda: predict.predict_images([f"--from={place}", picture]),
        lambda: export.export_network([f"--from={place}", f"--to={out}/exported"]),
        lambda: export.export_network([f"--from={place}", f"--to={out}/weights.safetensors"]),
        lambda: doctor.examine_numerics([f"--workdir={place}", here, f"--out={out}/doctor.html"]),
        lambda: replay.replay_step([str(place), here]),
    )
    number = zlib.crc32(b"".join((place / name).read_bytes() for name in (*DOCUMENTS, f"{STEP}_METADATA")))
    commands[number % len(commands)]()


def mutant(rng, kind, files):
    """Returns {name: contents, or None for a file that is gone} of the files that differ from the intact `files`."""
    pattern = {"tfrecord": "*-train.tfrecord-*", "array_record": "*-train.array_record-*"}.get(kind, "*")
    if kind in ("metrics", "data", "config"):
        pattern = f"{kind}.json*"
    elif kind in ("checkpoint", "workdir"):
        return (_checkpoint if kind == "checkpoint" else _field)(rng, files)
    names = sorted(name for name in files if fnmatch.fnmatch(name, pattern))
    name, other = pick(rng, names), pick(rng, names)
    changed = PARTS.get(kind, mutations.json_text)(rng, files[name], files[other])
    return {f"mutant.{kind}" if f"mutant.{kind}" in files else name: changed}


def _checkpoint(rng, files):
    """Returns changes of files of a checkpoint; one in five has right checksums, so that the change reaches Orbax."""
    covered = sorted(name for name in files if name.startswith(STEP) and not name.endswith("success.txt"))
    name, other = pick(rng, covered), pick(rng, covered)
    mutate = mutations.json_text if files[name][:1] == b"{" else mutations.blind
    content = pick(rng, (None, files[other])) if chance(rng, 0.1) else mutate(rng, files[name], files[other])
    right = name != f"{STEP}checksums.json" and chance(rng, 0.2)
    return {name: content} | (_summed(files, {name: content}) if right else {})


def _field(rng, files):
    """Returns a change of one field of a document or of the record of the checkpoint, with right checksums."""
    name = pick(rng, (*DOCUMENTS, f"{STEP}_METADATA"))
    document = json.loads(files[name])
    if name in DOCUMENTS:
        return {name: mutations.changed_json(rng, document)}
    custom = document["custom_metadata"]
    custom["record"] = mutations.changed_json(rng, json.loads(custom["record"])).decode()
    change = {name: json.dumps(document).encode()}
    return change | _summed(files, change)


def _summed(files, changes):
    return {f"{STEP}checksums.json": mutations.checksums(files | changes, STEP)}
