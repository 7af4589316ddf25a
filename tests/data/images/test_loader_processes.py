"""The loader in worker processes, each in a program of its own: they import the main module anew."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from tests import ROOT
from tests.data import made

pytestmark = pytest.mark.slow

START = """
import contextlib, hashlib, itertools, json, multiprocessing, os, signal, sys, time
from mixedres.data import DataError, load

def digest(batches):
    return [hashlib.sha256(b"".join(batch[key].tobytes() for key in sorted(batch))).hexdigest() for batch in batches]

def opened(root, **options):
    return load("folder", **{"dir": root, "image_size": 16, "batch_size": 8, "threads": 1, "flip": True} | options)

def take(source, count, **options):
    with contextlib.closing(source.train_batches(40, seed=3, **options)) as batches:
        return list(itertools.islice(batches, count))

def left():
    end = time.monotonic() + 20
    while multiprocessing.active_children() and time.monotonic() < end:
        time.sleep(0.05)
    return [process.pid for process in multiprocessing.active_children()]
"""


def run(tmp_path, code, *arguments):
    """What a program prints as its last line, from JSON; it must have nothing to say on stderr."""
    script = tmp_path / "program.py"
    main = "if __name__ == '__main__':\n" + textwrap.indent(textwrap.dedent(code), "    ")
    script.write_text(START + main)
    command = [sys.executable, str(script), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1]), result.stderr


@pytest.fixture
def root(tmp_path):
    made.write_folder(tmp_path / "images", 50)
    made.write_folder(tmp_path / "images", 21, "val")
    return tmp_path / "images"


def test_worker_processes_make_the_batches_of_threads(root, tmp_path):
    code = """
        from tests.interruptions import runs

        before = runs.shared_memory()
        threads, one, two = (opened(sys.argv[1], workers=workers) for workers in (0, 1, 2))
        whole = digest(take(threads, 6))
        result = {"distinct": len(set(whole)), "two": digest(take(two, 6)) == whole}
        # Another number of workers goes on where the last stopped; a batch is a chunk of 32 rows and one of 8.
        result["one"] = digest(take(one, 3, first_step=1)) == whole[1:4]
        result["eval"] = digest(one.eval_batches(8)) == digest(threads.eval_batches(8))
        result["left"] = left() + runs.left_in_shared_memory(before)
        print(json.dumps(result))
    """
    result, stderr = run(tmp_path, code, root)
    assert result == {"distinct": 6, "two": True, "one": True, "eval": True, "left": []}
    assert "leaked" not in stderr and "Traceback" not in stderr, stderr


def test_unreadable_images_are_reported_from_workers(root, tmp_path):
    [path] = (root / "train").glob("*/013.jpg")
    code = """
        strict = opened(sys.argv[1], workers=1)  # the file is damaged after the look at the start
        with open(sys.argv[2], "r+b") as file:
            file.truncate(os.path.getsize(sys.argv[2]) - 40)
        source = opened(sys.argv[1], workers=1, on_error="skip")
        take(source, 2)  # both epochs have it, or the one that follows
        result = {"unreadable": list(source.unreadable)}
        try:
            take(strict, 2)
        except DataError as error:
            result["error"] = str(error)
        print(json.dumps(result))
    """
    result, stderr = run(tmp_path, code, root, path)
    assert result["unreadable"] == [str(path)]
    assert result["error"].startswith(f"{path}: ") and "\n" not in result["error"], result["error"]
    assert "leaked" not in stderr


def test_killed_worker_ends_the_run(root, tmp_path):
    code = """
        batches = opened(sys.argv[1], workers=2).train_batches(40, seed=0)
        next(batches)
        children = multiprocessing.active_children()
        result = {"children": len(children)}
        start = time.monotonic()
        os.kill(children[0].pid, signal.SIGKILL)
        try:
            while time.monotonic() - start < 30:
                next(batches)
        except DataError as error:
            result["error"] = str(error)
        print(json.dumps(result | {"left": left()}))
    """
    result, _ = run(tmp_path, code, root)
    assert result["children"] == 2 and result["left"] == []
    assert result["error"].startswith("a process that decodes images was killed; if memory ran out, set fewer")
    assert "--config.data.workers" in result["error"] and "\n" not in result["error"]


def test_no_source_imports_tensorflow(root, tmp_path):
    made.prepare_layouts(tmp_path, {"train": made.examples(8), "validation": made.examples(6)})
    code = """
        for name, where in (("tfds:toy", "array_record"), ("tfds:toy", "tfrecord"), ("imagenet2012", "models")):
            directory = os.path.join(sys.argv[1], where)
            source = load(name, dir=directory, image_size=16, batch_size=4, threads=2)
            with contextlib.closing(source.train_batches(4, seed=0)) as batches:
                digest([next(batches), *source.eval_batches(4)])
        print(json.dumps(sorted({name.split(".")[0] for name in sys.modules} & {"tensorflow", "torch", "tensorboard"})))
    """
    assert run(tmp_path, code, tmp_path)[0] == []
