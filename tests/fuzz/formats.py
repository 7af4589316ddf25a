"""The intact files that mutations start from, small and made on the spot, and what commands call on them."""

import argparse
import fnmatch
import json

import numpy as np
from PIL import Image, ImageCms

from mixedres import data
from mixedres._internal.cli import console
from mixedres._internal.errors import ConfigError, DataError, config_errors
from mixedres._internal.formats import without_stamp
from mixedres.checkpoints import Checkpoints, RecordedRun, RunDirectory, read_weights, workdir
from mixedres.data.datasets.folder import ImageFolder
from mixedres.data.images import chunks
from mixedres.export import __main__ as export
from mixedres.predict.classifier import read_classifier
from mixedres.train import start
from tests.data import made
from tests.fuzz import mutations
from tests.fuzz.mutations import chance, pick
from tests.train import run_cases
from tests.train.run_cases import build

SIZE = 24
STEP = "checkpoints/2/"


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
    for kind in ("tfrecord", "array_record"):
        held = {"train": made.examples(4), "validation": made.examples(2)}
        made.prepare(place / kind, "toy", held, file_format=kind, shards=1)
    made.write_folder(place / "images", count=24)
    made.write_folder(place / "images", count=9, part="val")
    run_cases.fit(config(place), place / "run")
    (place / "safetensors").mkdir()
    for layout, name in (("torchvision", "first"), ("transformers", "second"), ("mixedres", "mutant")):
        target = place / "safetensors" / f"{name}.safetensors"
        export.export_network([f"--from={place / 'run'}", f"--to={target}", f"--layout={layout}"])


def config(place):
    """Returns the config of a run of two steps on the images."""
    short = {"steps": 2, "batch_size": 8, "num_devices": 1, "eval_every": 0, "checkpoint_every": 0}
    return run_cases.on_images(place, "fp16", **short)


def read_image(place):
    """Reads an image as `mixedres.predict`, training and evaluation do; its size chooses how."""
    (path,) = place.glob("mutant.*")
    size = path.stat().st_size
    name, channels = ("official", "official_fast", "torch")[size % 3], 1 + 2 * (size // 3 % 2)
    images = ImageFolder("images, train", place, [path.name], np.zeros(1, np.int32))
    options = data.Options(1, image_size=SIZE, preprocessing=name, flip=True)
    reader = chunks.ImageReader(images, options, data.get_preprocessing(name), None, 1, channels, bool(size // 6 % 2))
    chunks.TrainChunks(reader, 1, range(1), 0, seed=size)[0]
    chunks.EvalChunks(reader, 1, range(1))[0]
    for found in data.center_crops([path], reader.preprocessing.input_spec(SIZE, channels), 1):
        if isinstance(found, str):
            raise ConfigError(f"{path}: {found}")


def read_records(place):
    """Loads the data set as `mixedres.main` does, and reads every image; those that are skipped are printed."""
    with config_errors("config.data"):
        source = data.load("tfds:toy", dir=str(place), image_size=SIZE, batch_size=1, on_error="skip")
        source.fingerprint  # noqa: B018  (it reads records)
    unreadable = {}
    for part in (source.data_set.train, source.data_set.eval):
        reader = chunks.ImageReader(part, source.options, source.preprocessing, None, 3, 3, False)
        if len(part):
            unreadable |= chunks.EvalChunks(reader, len(part), range(len(part)))[0]["unreadable"]
    if unreadable:
        console.say(repr(unreadable))
        raise DataError(f"{len(unreadable)} images cannot be used")


def classify(path):
    """Makes the classifier as `mixedres.predict` does, and prints the classes."""
    options = dict.fromkeys(("labels", "precision", "image_size", "preprocessing", "model_version"))
    chosen = read_classifier(argparse.Namespace(source=str(path), **options))
    for text in (*chosen.notes, *chosen.class_names):
        console.say(f"note: {text}")


def targets(corpus):
    """Returns {format: the functions of the folder of a mutant}; each ends as its command would."""
    experiment, run = build(config(corpus)), corpus / "run"
    shapes = experiment.variable_shapes()
    known, of_data = (without_stamp(json.loads((run / name).read_text())) for name in (workdir.CONFIG, workdir.DATA))

    def initialize(place):
        path = str(place / "mutant.safetensors")
        console.say(start.load_weights(path, shapes, experiment.model, experiment.source.input_spec).note)

    def resume(place):
        with RunDirectory(place).claim(known, clean=False, data=of_data):
            RecordedRun(place).finished(known)

    def restore(place):
        """Reads a checkpoint as resuming and as `mixedres.predict` does."""
        read_weights(place)
        start.restore_newest(experiment, Checkpoints(place / workdir.CHECKPOINTS))

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
        "data": [resume, lambda place: RecordedRun(place).check_data(of_data, classes_only=True), classify],
        "config": [resume, begin],
        "checkpoint": [restore],
    }


def mutant(rng, kind, files):
    """Returns {name: contents, or None for a file that is gone} of the files that differ from the intact `files`."""
    if kind == "checkpoint":
        return _checkpoint(rng, files)
    pattern = {"tfrecord": "*-train.*", "array_record": "*-train.*", "data": "data.json", "config": "config.json"}
    names = fnmatch.filter(sorted(files), pattern.get(kind, "*"))
    name, other = pick(rng, names), pick(rng, names)
    if kind in mutations.PARTS:
        changed = mutations.in_parts(rng, kind, files[name])
    else:
        mutate = mutations.json_text if kind in ("data", "config") else mutations.blind
        changed = mutate(rng, files[name], files[other])
    return {f"mutant.{kind}" if f"mutant.{kind}" in files else name: changed}


def _checkpoint(rng, files):
    """Returns changes of files of a checkpoint; one in five has right checksums, so that the change is read."""
    covered = sorted(name for name in files if name.startswith(STEP))
    name, other = pick(rng, covered), pick(rng, covered)
    mutate = mutations.json_text if files[name][:1] == b"{" else mutations.blind
    content = pick(rng, (None, files[other])) if chance(rng, 0.1) else mutate(rng, files[name], files[other])
    right = name != f"{STEP}checksums.json" and chance(rng, 0.2)
    change = {name: content}
    return change | ({f"{STEP}checksums.json": mutations.checksums(files | change, STEP)} if right else {})
