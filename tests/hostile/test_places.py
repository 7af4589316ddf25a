"""The directory of a run: moved, removed, linked, damaged, full, and what else stands in it."""

import contextlib
import errno
import fcntl
import functools
import json
import os
import shutil

import pytest

from mixedres import checkpoints, main
from mixedres._internal.cli import command_line, compilation
from mixedres._internal.errors import ConfigError, MemoryShortage, TrainingError
from mixedres.checkpoints import RunDirectory, folder, workdir
from mixedres.train.metrics.log import RunLog
from mixedres.train.metrics.writers import MetricWriter
from tests.hostile.commands import assert_one_line, run_here
from tests.train import run_cases
from tests.train.run_cases import build

pytestmark = pytest.mark.usefixtures("small_network")


@functools.cache
def finished(root):
    """A finished tiny run in the directory of all tests, which is not to be changed, and its summary."""
    return root / "finished", train(root / "finished")


def train(directory, clean=False):
    """A tiny run: six steps with a checkpoint after every second."""
    return run_cases.fit(run_cases.tiny("fp16"), directory, clean=clean)


def copy(place):
    """A copy of the finished run in `place`."""
    shutil.copytree(finished(place.parent)[0], place / "run")
    return place / "run"


def go_on(directory):
    """Takes the summary away, so that the run is continued, to the same bits."""
    (directory / workdir.SUMMARY).unlink(missing_ok=True)
    assert train(directory)["fingerprint"] == finished(directory.parents[1])[1]["fingerprint"]


def test_run_whose_directory_is_removed_ends_with_one_line(place):
    """Ends in one line, and a directory in its place keeps what is in it; the moved one can be continued."""
    directory, moved = place / "run", place / "moved"

    def remove():
        while directory.exists():  # a save may be writing into it
            shutil.rmtree(directory, ignore_errors=True)

    def replace():
        directory.rename(moved)
        directory.mkdir(exist_ok=True)  # a save may have made it again
        (directory / "thesis.txt").write_text("mine")

    for action, step in ((remove, 6), (replace, 3)):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(TrainingError) as caught:
            run_cases.after(patch, RunLog, "train", action, step)
            train(directory)
        assert f"could not be written: {directory} was removed or moved during the run" in str(caught.value)
        left = {path.name for path in directory.iterdir()} if directory.exists() else set()
        assert left - {workdir.CHECKPOINTS} == ({"thesis.txt"} if action is replace else set())
        shutil.rmtree(directory, ignore_errors=True)
    go_on(moved)


def test_clean_follows_no_links(place):
    config = build(run_cases.tiny("fp16")).resolved
    for name in (workdir.CHECKPOINTS, f"{workdir.CHECKPOINTS}/2", "nonfinite"):
        directory, elsewhere = copy(place), place / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "7").mkdir()
        shutil.rmtree(directory / name, ignore_errors=True)
        (directory / name).symlink_to(elsewhere)
        before = sorted(directory.rglob("*"))
        with pytest.raises(ConfigError, match="is a link, which is not followed, so nothing was removed"):
            RunDirectory(directory).claim(config, clean=True)
        assert sorted(directory.rglob("*")) == before and (elsewhere / "7").is_dir()
        shutil.rmtree(directory), shutil.rmtree(elsewhere)
    directory = copy(place)
    (directory / workdir.CHECKPOINTS / "7").write_text("a file")
    with pytest.raises(ConfigError, match="7 is no directory of a run"):
        RunDirectory(directory).claim(config, clean=True)


def test_links_in_place_of_files_are_not_followed(place):
    """A directory that others made must not lead a run to other files."""
    config = build(run_cases.tiny("fp16")).resolved
    for name in (workdir.LOCK, f"{workdir.CONFIG}.part", f"{workdir.DATA}.part", workdir.METRICS):
        directory, mine = place / name.strip("."), place / "mine"
        directory.mkdir()
        mine.write_text("thesis")
        (directory / name).symlink_to(mine)
        with contextlib.suppress(ConfigError, OSError), RunDirectory(directory).claim(config, clean=False):
            RunDirectory(directory).begin(config, {"class_names": []})
        with contextlib.suppress(OSError), contextlib.closing(MetricWriter(directory / workdir.METRICS, 0)) as writer:
            writer.write(1, "train", {"loss": 1.0})
        assert mine.read_text() == "thesis", name


def test_run_without_a_checkpoint_gives_way_to_another(place):
    config = build(run_cases.tiny("fp16")).resolved
    with RunDirectory(place).claim(config | {"batch_size": 400000}, clean=False):
        RunDirectory(place).begin(config | {"batch_size": 400000})
    (place / workdir.METRICS).write_text('{"step": 1, "kind": "train"}\n')
    with RunDirectory(place).claim(config, clean=False):
        RunDirectory(place).begin(config)
    assert json.loads((place / workdir.CONFIG).read_text())["batch_size"] == config["batch_size"]
    assert not (place / workdir.METRICS).exists()
    (place / workdir.CHECKPOINTS / "2").mkdir()
    with pytest.raises(ConfigError, match="holds a run with a different config"):
        RunDirectory(place).claim(config | {"batch_size": 8}, clean=False)


def test_exhausted_memory_is_one_line(place):
    """In the words of XLA on a CPU and on a GPU, and of NumPy; another error is not taken for it."""

    def failing(error):
        def command(_):
            raise error

        return run_here(lambda argv: command_line.run("mixedres", command, argv, smaller="a smaller batch"))

    for error, asked in (
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 6400000000000 bytes."), "6,400.0 GB"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 32.00GiB."), "34.4 GB"),
        (MemoryError("Unable to allocate 1.09 TiB for an array with shape (400000, 3000000)"), "1,198.5 GB"),
    ):
        assert_one_line(failing(error), 1, f": {asked} more were asked for; ", " GB; set a smaller batch")
    assert_one_line(failing(MemoryError()), 1, "the memory does not suffice; this machine has")
    with pytest.raises(RuntimeError, match="something else"):
        failing(RuntimeError("something else"))


@pytest.mark.slow
def test_step_larger_than_the_memory_is_refused_before_it_runs(place):
    """Said after the compilation, before a batch of 79 GB is made."""
    big = ("--config.data.name=synthetic", "--config.data.num_classes=10", "--config.data.train_examples=1000000")
    config = ("--config=digits:fp32,model=cifar_resnet8,steps=2", *big)
    sizes = ("--config.batch_size=400000", "--config.data.image_size=256", f"--workdir={place}/run")
    outcome = run_here(main.main, *config, *sizes)
    assert_one_line(outcome, 1, "GB of memory where there are", "a smaller config.batch_size")


def test_network_larger_than_the_memory_is_refused_before_it_is_compiled(place):
    config = run_cases.tiny("fp32", data__num_classes=10**9)
    with pytest.raises(MemoryShortage, match=r"1,000,000,000 classes take [\d,.]+ GB of memory where"):
        run_cases.fit(config, place / "run")
    assert not (place / "run" / "config.json").exists()


def test_workdir_whose_name_is_no_text_holds_a_run(place):
    directory = place / os.fsdecode(b"\xff\xfe")
    go_on(shutil.copytree(finished(place.parent)[0], directory))


def test_missing_locks_are_a_warning(place, monkeypatch, capsys):
    def flock(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    train(place / "run")
    assert f"{place}/run cannot be locked (No locks available); make sure that nothing else" in capsys.readouterr().out
    assert not RunDirectory(place / "run").in_use()


def test_compiled_programs_of_other_users_are_not_loaded(place, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    directory = place / compilation.NAME
    assert compilation._directory("auto") == str(directory)
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.rmdir()
    (place / "mine").mkdir(mode=0o700)
    directory.symlink_to(place / "mine")
    assert compilation._directory("auto") is None
    directory.unlink()
    directory.mkdir()
    directory.chmod(0o770)  # writable by a group
    assert compilation._directory("auto") is None
    directory.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345)  # of somebody else
    assert compilation._directory("auto") is None


def test_damaged_data_json_is_read_from_the_checkpoint(place):
    directory, whole = copy(place), checkpoints.read_weights(finished(place.parent)[0])
    for damage in ("", '{"class_na', "[]", None):
        (directory / workdir.DATA).unlink()
        if damage is not None:
            (directory / workdir.DATA).write_text(damage)
        found = checkpoints.read_weights(directory)
        assert (found.class_names, found.input) == (whole.class_names, whole.input)


def test_damage_beside_the_checkpoints_is_harmless(place):
    """A cut config.json, no data.json, metrics that are no text, and an empty folder named like a checkpoint."""
    directory = copy(place)
    config, data = (json.loads((directory / name).read_text()) for name in (workdir.CONFIG, workdir.DATA))
    (directory / workdir.CONFIG).write_text('{"prec')
    (directory / workdir.DATA).unlink()
    with (directory / workdir.METRICS).open("ab") as file:
        file.write(b'\xff\xfe{"step": 1\n')
    (directory / workdir.CHECKPOINTS / "999").mkdir()
    assert checkpoints.read_weights(directory).run == workdir.portable(config)
    go_on(directory)
    assert json.loads((directory / workdir.CONFIG).read_text()) == config
    assert json.loads((directory / workdir.DATA).read_text()) == data


def test_run_without_any_config_asks_for_clean(place):
    directory = copy(place)
    (directory / workdir.CONFIG).write_text('{"prec')
    for path in (directory / workdir.CHECKPOINTS).rglob(folder.RECORD):
        path.write_text("{")
    with pytest.raises(ConfigError, match="start over with --clean"):
        train(directory)
    assert train(directory, clean=True)["fingerprint"] == finished(place.parent)[1]["fingerprint"]


def test_run_whose_checkpoints_are_not_mounted_is_refused(place):
    directory = copy(place)
    (directory / workdir.CHECKPOINTS).rename(place / "unmounted")
    (directory / workdir.SUMMARY).unlink()
    before = (directory / workdir.METRICS).read_bytes()
    for link in (False, True):
        if link:
            (directory / workdir.CHECKPOINTS).symlink_to(place / "nowhere")
        with pytest.raises(ConfigError, match="of a run that was under way is gone; put or mount it back"):
            train(directory)
        assert (directory / workdir.METRICS).read_bytes() == before
    (directory / workdir.CHECKPOINTS).unlink()
    (directory / workdir.CHECKPOINTS).symlink_to(place / "unmounted")
    go_on(directory)
