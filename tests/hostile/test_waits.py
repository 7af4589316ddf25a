"""Files that never end, images that take all memory, and signals at any moment."""

import os
import signal
import threading
import time

import numpy as np
import pytest
from PIL import Image

from mixedres import data
from mixedres._internal.errors import Stopped
from mixedres.checkpoints import RecordedRun
from mixedres.data.images import decoding
from mixedres.data.sources import Synthetic
from tests.checkpoints import saved_files
from tests.data import made
from tests.interruptions import runs
from tests.train import run_cases


def test_pipes_devices_and_huge_images_are_refused(place):
    """Passed over like any unreadable image; a pipe is not waited for, and a device not read to its end."""
    for part in ("train", "val"):
        made.write_noise(place / part, 16, 16, "PNG", count=4)
    os.mkfifo(place / "train" / "cat" / "pipe.png")
    (place / "train" / "dog" / "zeros.png").symlink_to("/dev/zero")
    Image.new("L", (200, 100)).save(place / "train" / "cat" / "large.png")
    with (place / "train" / "cat" / "bytes.png").open("wb") as sparse:
        sparse.truncate(2**30 + 1)
    options = {"dir": str(place), "image_size": 8, "batch_size": 11, "threads": 1}
    source = data.load("folder", **options, on_error="skip", max_pixels=19999)
    batches = source.train_batches(11, seed=0)
    assert next(batches)["image"].shape == (11, 8, 8, 3)
    batches.close()
    reasons = {name.rpartition("/")[2]: reason for name, reason in source.unreadable.items()}
    assert reasons.pop("large.png").startswith("it has 200x100 pixels; at least 4 a side and at most 19,999 in all")
    assert "more than 1,073,741,824" in reasons.pop("bytes.png")
    assert reasons == {"pipe.png": "not a regular file", "zeros.png": "not a regular file"}
    with pytest.raises(ValueError, match=r"at least 2 of the 20 images are damaged: .*not a regular file"):
        data.load("folder", **options)


def test_signal_while_no_batch_comes_ends_the_run(place):
    """The disk does not answer from batch 3 on: the state after three steps is saved."""
    hanging = threading.Event()
    batches = Synthetic.train_batches

    def stuck(self, *args, first_step=0, **options):
        for number, batch in enumerate(batches(self, *args, first_step=first_step, **options), first_step):
            if number == 3:
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
                hanging.wait()
            yield batch

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped) as caught:
        run_cases.shrink(patch)
        patch.setattr(Synthetic, "train_batches", stuck)
        patch.setattr("mixedres.data.prefetch._PATIENCE", 0.1)
        run_cases.fit(run_cases.tiny("fp16", checkpoint_every=0, eval_every=0), place / "run")
    hanging.set()
    assert caught.value.status == 143 and "the checkpoint of step 3 is saved" in str(caught.value)
    assert RecordedRun(place / "run").contents()["checkpoints"] == [3]


def test_decoding_threads_share_one_limit_of_memory(place):
    """What is under way never takes more than there is room for, and a too large image goes alone."""
    room, lock, under_way, most = decoding._Memory(100), threading.Lock(), [], []

    def work(size):
        with room.reserve(size):
            with lock:
                under_way.append(size)
                most.append(list(under_way))
            time.sleep(0.002)
            with lock:
                under_way.remove(size)

    sizes = [int(size) for size in np.random.default_rng(0).integers(1, 60, 60)] + [1000, 1000]
    threads = [threading.Thread(target=work, args=(size,)) for size in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(sum(sizes) <= 100 or sizes == [1000] for sizes in most) and max(map(len, most)) > 1


def started(place, *options):
    """A process that trains for a minute or two."""
    made.write_noise(place / "images", 16, 16, "PNG", count=20)
    long = ("--config=folder:fp32,model=cifar_resnet8,steps=100000", "--config.batch_size=8", "--config.eval_every=0")
    return runs.Run((*long, f"--config.data.dir={place}/images", *options), place / "run")


def assert_whole(place):
    """Nothing is half written."""
    assert not list(place.rglob("*.part")) and not list(place.rglob(saved_files.PARTIAL[0].format("*")))


# Seconds after the command takes signals, 0.2 s of CPU time after its start. Before that Python answers signals.
EARLY = [(signal.SIGINT, delay) for delay in (0.0, 0.6, 2.0, 3.5)] + [(signal.SIGTERM, 2.5), (signal.SIGHUP, 2.5)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "delay", "workers"), [(*case, 0) for case in EARLY] + [(2, 0.0, 2), (2, 0.8, 2)])
def test_signal_ends_the_whole_group_in_one_line(kind, delay, workers, place):
    """In the first seconds, and while processes that decode start; a terminal sends it to the whole group."""
    before, run = runs.shared_memory(), started(place, f"--config.data.workers={workers}")
    if workers:
        run.training.wait()
    else:
        runs.wait_until_it_takes_signals(run.process)
    time.sleep(delay)
    assert run.end_as_slurm_does([kind]) == 128 + kind, run.lines
    assert "Traceback" not in "".join(run.lines) and f"stopped by {signal.Signals(kind).name}" in run.lines[-1]
    assert_whole(place)
    assert runs.left_in_shared_memory(before) == []


@pytest.mark.slow
def test_closed_terminal_saves_and_ends_the_run(place):
    run = started(place)
    assert runs.wait_until(lambda: run.process.poll() is not None or runs.newest_step(place / "run"))
    assert run.end(signal.SIGHUP) == 129
    assert "SIGHUP" in "".join(run.lines) and RecordedRun(place / "run").contents()["checkpoints"]
    assert_whole(place)
