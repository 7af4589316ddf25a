"""What is exported computes the same without mixedres, and without anything but jax."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from mixedres import checkpoints, data
from mixedres.config import flatten
from mixedres.data import InputSpec
from mixedres.export import network as exporting
from mixedres.predict import find_images
from tests import run_command
from tests.amp import graphs
from tests.checkpoints import saved_files
from tests.data import made
from tests.predict import chosen
from tests.train import run_cases

# What an installation of jax brings.
WITH_JAX = ("jax", "jaxlib", "numpy", "numpy.libs", "ml_dtypes", "opt_einsum", "scipy", "scipy.libs")

pytestmark = pytest.mark.usefixtures("small_network")


def record(patch, **changed):
    """Runs are read as if they had been trained with these keys."""
    read = checkpoints.read_weights

    def changed_run(path):
        file = read(path)
        return dataclasses.replace(file, run=file.run | changed)

    patch.setattr(checkpoints, "read_weights", changed_run)


@pytest.fixture(scope="module")
def only_jax(tmp_path_factory):
    """An import path with jax and what it depends on, and nothing else that is installed here."""
    directory = tmp_path_factory.mktemp("only_jax")
    for name in WITH_JAX:
        for path in sys.path:
            if path and (pathlib.Path(path) / name).is_dir():
                (directory / name).symlink_to(pathlib.Path(path) / name)
                break
    return directory


def alone(only_jax, *arguments):
    """Runs Python without site-packages."""
    environment = {"PYTHONPATH": str(only_jax), "JAX_PLATFORMS": "cpu", "PATH": os.environ["PATH"]}
    options = {"env": environment, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([sys.executable, "-S", *map(str, arguments)], **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def cropped(path, spec):
    (found,) = data.center_crops([path], spec, threads=1)
    return found


def images_of(place, count):
    """(count, 24, 24, 3) uint8, as the evaluation of the run sees them."""
    spec = InputSpec.from_json(json.loads((place / "run" / "data.json").read_text())["input"])
    paths = find_images(str(place / "images" / "val"))[:count]
    return paths, np.stack([*data.center_crops(paths, spec, threads=1)])


def test_folder_explains_itself(place, only_jax, tmp_path, capsys):
    assert run_command("export", f"--from={place / 'run'}", f"--to={tmp_path / 'deep' / 'to'}") == 0
    to = tmp_path / "deep" / "to"
    names = {"model.jax", "load.py", "labels.json", "model.json", "README.md", "flatbuffers.zip"}
    assert {path.name for path in to.iterdir()} == names and {path.name for path in to.parent.iterdir()} == {"to"}
    shown = alone(only_jax, to / "load.py").splitlines()
    assert shown[0] == "a black image" and {line.split()[1] for line in shown[1:]} == set(made.CLASSES)
    facts = json.loads((to / "model.json").read_text())
    assert facts["precision"] == "fp16" and facts["input"]["shape"] == [24, 24, 3]
    readme = (to / "README.md").read_text()
    assert "uint8 (n, 24, 24, 3)" in readme and "saved_model" not in readme
    # It sees the prediction's own pixels, but for rounding.
    turned = [((91, 120), kind, 6) for kind in ("JPEG", "TIFF")]
    for size, kind, orientation in (((90, 71), "PNG", 1), ((20, 18), "PNG", 1), *turned):
        path = tmp_path / f"cat.{kind}"
        path.write_bytes(made.turned(Image.fromarray(made.photo(*size, seed=3)), orientation, kind))
        seen, expected = reader(to)(path), cropped(path, InputSpec.from_json(facts["input"]))
        assert seen.dtype == expected.dtype and made.difference(seen, expected).max() <= 2.01


def reader(folder):
    """The function `read_photograph` of load.py."""
    source, names = (folder / "load.py").read_text(), {"np": np, "NamedTuple": NamedTuple}
    part = source[source.index("\nclass Box") : source.index("\ndef printable")]
    exec(part.partition("def options_for_cpus")[0], names)
    return names["read_photograph"]


@pytest.mark.slow
def test_loader_reads_photographs(place, tmp_path):
    assert run_command("export", f"--from={place / 'run'}", f"--to={tmp_path / 'to'}", "--precision=fp32") == 0
    paths, _ = images_of(place, 3)
    given = [sys.executable, tmp_path / "to" / "load.py", *paths]
    shown = subprocess.run(given, capture_output=True, text=True, check=True).stdout.splitlines()
    assert shown[::4] == paths
    cut, array = tmp_path / "cut.jpg", tmp_path / "x.npy"
    cut.write_bytes(pathlib.Path(paths[0]).read_bytes()[:-99])
    np.save(array, np.zeros((1, 9, 9, 3), np.uint8))
    wrong = ["none.jpg", __file__, tmp_path, cut, paths[0], array]
    failed = subprocess.run([*given[:2], *map(str, wrong)], capture_output=True, text=True)
    reasons = ["No such file or directory", "cannot identify image file", "Is a directory", "Truncated File Read"]
    reasons += ["the array is not uint8 (n, 24, 24, 3)"]
    for path, reason, line in zip([*wrong[:4], array], reasons, failed.stderr.splitlines()[:5], strict=True):
        assert line.startswith(f"{path}: {reason}")
    assert failed.returncode == 1 and failed.stdout.splitlines() == shown[:4]
    helped = subprocess.run([*given[:2], "--help"], capture_output=True, text=True)
    assert helped.returncode == 0 and helped.stdout.startswith("Runs the network beside this file: python load.py")


def test_official_preprocessing_takes_float32(place, tmp_path):
    given = [f"--from={place / 'run'}", f"--to={tmp_path / 'to'}", "--preprocessing=official", "--precision=fp32"]
    assert run_command("export", *given) == 0
    readme = (tmp_path / "to" / "README.md").read_text()
    assert "float32 (n, 24, 24, 3)" in readme and "shorter side has 27 pixels" in readme
    assert "float32 (n, 24, 24, 3)" in (tmp_path / "to" / "load.py").read_text()
    path = tmp_path / "cat.png"
    ours = chosen(place / "run", "--preprocessing=official", "--precision=fp32")
    for sides in ((90, 70), (20, 18), (33, 33)):
        Image.fromarray(made.photo(*sides, seed=3)).save(path)
        seen, shown = cropped(path, ours.spec), reader(tmp_path / "to")(path)[None]
        assert seen.dtype == shown.dtype == np.float32
        np.testing.assert_array_equal(shown[0], seen)
    program = jax.export.deserialize(bytearray((tmp_path / "to" / "model.jax").read_bytes()))
    found = program.call(shown)
    assert found["probabilities"].dtype == np.float32 and found["classes"].dtype == np.int32
    expected = ours.probabilities(ours.variables, jnp.asarray(shown))
    np.testing.assert_allclose(found["probabilities"], expected, rtol=0, atol=1e-6)


def images_of_every_mode(folder):
    """Files of every mode that Pillow writes into a file that we read, gray ones of 16 bits also turned by EXIF."""
    photo, rng = Image.fromarray(made.photo(90, 71, seed=3)), np.random.default_rng(0)
    levels = rng.integers(0, 65536, (71, 90), np.uint16) // 3
    kinds = {mode: "PNG" for mode in ("1", "L", "LA", "P", "RGB", "RGBA")} | {"CMYK": "TIFF", "LAB": "TIFF"}
    images = {f"{mode}.{kind}": photo.convert(mode) for mode, kind in kinds.items() if mode != "LAB"}
    images |= {"LAB.TIFF": Image.merge("LAB", photo.split()), "I;16.PNG": Image.fromarray(levels)}
    images |= {"I;16.TIFF": Image.fromarray(levels), "I.TIFF": Image.fromarray(np.int32(levels) * 4 - 9000)}
    images["transparent.PNG"] = photo.quantize(7)
    images["transparent.PNG"].info["transparency"] = bytes(range(7))
    for name, image in images.items():
        image.save(folder / name)
    for name in ("I;16.PNG", "P.PNG", "CMYK.TIFF"):
        path = folder / f"turned_{name}"
        path.write_bytes(made.turned(images[name], 6, path.suffix[1:]))
    return sorted(folder.iterdir())


@pytest.mark.parametrize("preprocessing", ["torch", "official", "official_fast"])
def test_loader_reads_every_mode_as_predict_does(preprocessing, place, tmp_path):
    given = [f"--from={place / 'run'}", f"--to={tmp_path / 'to'}", f"--preprocessing={preprocessing}"]
    assert run_command("export", *given, "--precision=fp32") == 0
    spec = chosen(place / "run", f"--preprocessing={preprocessing}", "--precision=fp32").spec
    (tmp_path / "images").mkdir()
    for path in images_of_every_mode(tmp_path / "images"):
        seen, expected = reader(tmp_path / "to")(path), cropped(str(path), spec)
        assert seen.dtype == expected.dtype, path.name
        assert np.abs(np.float32(seen) - expected).max() <= (0 if preprocessing == "official" else 2.01), path.name
    Image.fromarray(np.zeros((9, 9), np.float32)).save(tmp_path / "F.tiff")
    with pytest.raises(ValueError, match="floating-point numbers of an unknown range"):
        reader(tmp_path / "to")(tmp_path / "F.tiff")
    assert "floating-point numbers of an unknown range" in cropped(str(tmp_path / "F.tiff"), spec)


# A process of its own, because TensorFlow is imported; its network is as small as that of the run.
EXPORT = """
import sys, pytest
from tests import run_command
from tests.train import run_cases
run_cases.shrink(pytest.MonkeyPatch())
sys.exit(run_command("export", *sys.argv[1:]))
"""
TENSORFLOW = """
import sys, numpy as np, tensorflow as tf
network = tf.saved_model.load(sys.argv[1])
found = network.signatures["serving_default"](images=tf.constant(np.load(sys.argv[2])))
encoded = [open(path, "rb").read() for path in sys.argv[4:]]
pictures = network.signatures["image_bytes"](image_bytes=tf.constant(encoded))
np.savez(sys.argv[3], pictures=pictures["probabilities"], **{name: found[name].numpy() for name in found})
"""


@pytest.mark.interop
@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("bf16", 1e-2)])
def test_saved_model_computes_the_same(precision, tolerance, place, tmp_path):
    pytest.importorskip("tensorflow", reason="needs the extra tf")
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    export = [f"--from={place / 'run'}", f"--to={tmp_path / 'to'}", f"--precision={precision}", "--saved_model"]
    subprocess.run([sys.executable, "-c", EXPORT, *export], env=environment, check=True, timeout=300)
    assert "saved_model/" in (tmp_path / "to" / "README.md").read_text()
    paths, images = images_of(place, 7)
    np.save(tmp_path / "images.npy", images)
    arguments = [tmp_path / "to" / "saved_model", tmp_path / "images.npy", tmp_path / "found.npz", *paths]
    subprocess.run([sys.executable, "-c", TENSORFLOW, *map(str, arguments)], env=environment, check=True, timeout=300)
    with np.load(tmp_path / "found.npz") as archive:
        found = dict(archive)
    expected = np.asarray(
        exporting.as_function(chosen(place / "run", f"--precision={precision}"))(images)["probabilities"]
    )
    np.testing.assert_allclose(found["probabilities"], expected, rtol=0, atol=tolerance)
    np.testing.assert_array_equal(found["classes"], expected.argmax(-1))
    # Its decoder and its resizing are others.
    np.testing.assert_allclose(found["pictures"], expected, rtol=0, atol=0.02)


@pytest.mark.parametrize("step", ["mixedres.export.files._write_reader", "os.rename"])  # within, and the last one
def test_failed_write_leaves_nothing(step, place, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(step, saved_files.full_disk)
    assert run_command("export", f"--from={place / 'run'}", f"--to={tmp_path / 'to'}") == 2
    assert "cannot be written (No space left on device)" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_kept_layers_are_stored_and_computed_in_float32(place, monkeypatch):
    """Where it is taken in its own precision; --precision asks for a preset as it is."""
    record(monkeypatch, **{"precision.keep_float32": "^/head$"})
    for preset, head in ((None, "f32"), ("fp16", "f16"), ("fp32", "f32")):
        ours = chosen(place / "run", *([f"--precision={preset}"] if preset else []))
        images = jnp.zeros((2, *ours.spec.shape), jnp.uint8)
        jaxpr = jax.make_jaxpr(exporting.as_function(ours))(images)
        found = graphs.dtypes_by(lambda scope: "/head" in scope, jaxpr)
        assert found == {True: {head}, False: {"f32" if preset == "fp32" else "f16"}}
        kernel = ours.variables["params"]["head"]["kernel"]
        (stored,) = [const for const in jaxpr.consts if const.shape == kernel.shape]
        assert (stored == kernel).all() == (head == "f32") and stored.dtype.name == f"float{head[1:]}"
        # Biases, norms and statistics are never stored in half.
        assert {const.dtype.name for const in jaxpr.consts if const.ndim == 1} == {"float32"}
    found = jax.jit(exporting.as_function(ours))(images_of(place, 7)[1])
    np.testing.assert_array_equal(found["classes"], np.argmax(found["probabilities"], axis=1))


def test_rewritten_run_needs_a_precision_for_export(place, tmp_path, monkeypatch, capsys):
    other = flatten(run_cases.tiny("bf16_rewrite"))
    record(monkeypatch, **{key: other[key] for key in other if key.startswith("precision.")})
    assert run_command("export", f"--from={place / 'run'}", f"--to={tmp_path / 'to'}") == 2
    assert "add --precision=fp32 or bf16 or fp16" in capsys.readouterr().err
