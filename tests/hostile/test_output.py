"""Output that cannot be written, and text from data that a terminal would obey."""

import contextlib
import io
import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from mixedres._internal.cli import console, progress
from mixedres.data import Options, get_preprocessing
from mixedres.data.datasets import folder
from mixedres.data.images import chunks
from mixedres.predict import __main__ as predict
from tests import ROOT
from tests.data import made
from tests.hostile.commands import assert_one_line, environment, run, run_here, tiny_weights

TINY = ("--config=digits:fp32,model=cifar_resnet8,steps=4", "--config.data.image_size=8", "--config.num_devices=1")


def shell(place, redirection, **env):
    """Trains a tiny run with this redirection; the exit status, and what was said."""
    command = f"{sys.executable} -m mixedres.main {' '.join(TINY)} --workdir={place}/run {redirection}"
    done = subprocess.run(["bash", "-c", command], env=environment(env), cwd=ROOT, capture_output=True, timeout=240)
    return done.returncode, (done.stdout + done.stderr).decode(errors="replace")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("redirection", "lines"),
    [("> /dev/full", 0), ("| head -1; exit ${PIPESTATUS[0]}", 1), ("2>&-", None), (">&-", 0), ("<&- >&- 2>&-", 0)],
)
def test_run_without_a_place_for_its_log_succeeds(redirection, lines, place):
    """A full disk, a reader that has gone, closed streams; `lines` of the log are seen, or all."""
    status, said = shell(place, redirection)
    assert status == 0 and (place / "run" / "summary.json").exists()
    assert said.startswith("mixedres ") if lines != 0 else said == ""
    assert said.count("\n") == lines or lines is None
    if redirection.endswith("&-"):
        command = f"{sys.executable} -m mixedres.predict --from={place}/run {place}/no.jpg {redirection}"
        done = subprocess.run(["bash", "-c", command], env=environment(), cwd=ROOT, capture_output=True, timeout=240)
        assert done.returncode == 2


def test_program_without_a_console_shows_no_progress(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    shown = progress.StepProgress(10, 0, 16)
    shown.update(1, {"loss": 1.0}, 1.0)
    shown.close()
    with progress.ImageProgress("decoding", 10) as images:
        images.add()
    console.complain("a mistake")
    assert capsys.readouterr().out == ""


def test_log_drops_lines_while_the_disk_is_full(place):
    class Disk(io.RawIOBase):
        def __init__(self, room):
            self.room, self.written = list(room), b""

        def writable(self):
            return True

        def write(self, data):
            room = self.room.pop(0) if self.room else len(data)
            if not room:
                raise OSError(28, "No space left on device")
            self.written += bytes(data[:room])
            return min(room, len(data))

    # Room of each write: a part of a line, nothing for two lines, a part again, and then enough.
    disk = Disk([3, 0, 0, 0, 1, 0])
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BufferedWriter(disk), "utf-8")):
        for line in ("first", "second", "third", "fourth", "fifth", "sixth"):
            console.say(line)
    assert disk.written == b"first\nsecond\nthird\nfourth\nfifth\nsixth\n"


@pytest.mark.slow
def test_names_outside_the_encoding_are_escaped(place):
    made.write_noise(place / "images", 16, 16, "PNG", count=12)
    (place / "images" / "cat").rename(place / "images" / "苹果")
    (place / "images" / "dog").rename(place / "images" / "梨")
    (place / "images" / "梨" / "bad.png").write_text("nothing")
    options = ("--config=folder:fp32,model=cifar_resnet8,steps=4", f"--config.data.dir={place}/images")
    options += ("--config.data.image_size=8", "--config.batch_size=8", "--config.data.on_error=skip")
    options += ("--config.data.split_seed=3", "--config.num_devices=1", f"--workdir={place}/run")
    outcome = run("mixedres.main", *options, env={"PYTHONIOENCODING": "ascii:strict"})
    assert outcome.returncode == 0, outcome.stderr
    assert any(r"\u68a8/bad.png: it is not an image" in line for line in outcome.stdout.splitlines())
    unreadable = json.loads((place / "run" / "summary.json").read_text())["unreadable_images"]
    assert unreadable["count"] == 1 and list(unreadable["first"]) == [f"{place}/images/梨/bad.png"]
    outcome = run("mixedres.predict", f"--from={place}/run", place / "images", env={"PYTHONIOENCODING": "ascii:strict"})
    assert_one_line(outcome, 1, "1 of the 25 files could not be classified")


def test_control_characters_in_names_are_escaped(place):
    names = ["\x1b]0;owned\x07", "two\nlines", "\u202egnp.exe", *map(str, range(7))]
    weights = tiny_weights(place / "weights.safetensors", class_names=names)
    Image.new("RGB", (32, 32)).save(place / "a.png")
    (place / "b\x1b[31m\nred.png").write_text("nothing")
    outcome = run_here(predict.main, f"--from={weights}", place / "a.png", place / "b\x1b[31m\nred.png", "--topk=10")
    assert (outcome.returncode, outcome.stdout.count("\n"), outcome.stderr.count("\n")) == (1, 11, 3)
    assert all(map(str.isprintable, (outcome.stdout + outcome.stderr).split("\n")))
    assert r"\x1b]0;owned\x07" in outcome.stdout and r"two\nlines" in outcome.stdout


def test_control_characters_in_notes_are_escaped(place):
    (place / "a").mkdir()
    (place / "a" / "b\x1b[31m\nnote: all is well.png").write_text("nothing")
    examples = folder.ImageFolder("images", place, ["a/b\x1b[31m\nnote: all is well.png"], np.zeros(1, np.int32))
    reader = chunks.ImageReader(
        examples, Options(1, image_size=8, on_error="skip"), get_preprocessing("torch"), None, 1, 3, False
    )
    unreadable = {}
    with pytest.raises(ValueError) as caught:
        reader.read_central(0, np.zeros((8, 8, 3), np.uint8))
    assert reader.refuse(0, caught.value, unreadable).isprintable() and all(map(str.isprintable, unreadable))


def test_long_values_are_shortened(place):
    outcome = run_here(predict.main, f"--from={place}", "x" * 50000)
    assert_one_line(outcome, 2, "characters ...")
    assert len(outcome.stderr.splitlines()[-1]) < 2500
