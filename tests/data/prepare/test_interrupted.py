"""An interrupted preparation: never taken for a whole one, continued by the same command, and by no other."""

import errno
import fcntl
import signal

import pytest
import tensorflow_datasets as tfds
from tensorflow_datasets.core.utils import version

from mixedres.data.prepare import spans, writer
from tests.data.prepare import prepare_cases as cases
from tests.data.prepare.prepare_cases import main


@pytest.fixture(autouse=True, scope="module")
def small_shards():
    """Shards of five images, of which the training set has six and the validation set one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "shard_bounds", lambda part: [*range(5, len(part), 5), len(part)])
        yield


@pytest.fixture(scope="module")
def whole(tars, small_shards, tmp_path_factory):
    """The files of a preparation that nothing interrupted."""
    data_dir = tmp_path_factory.mktemp("whole")
    assert main(cases.command(tars, data_dir)) == 0
    return cases.read_shards(data_dir / "imagenet2012/5.1.0")


def test_second_start_writes_only_missing_shards(whole, tars, tmp_path, monkeypatch, capsys):
    capsys.readouterr()
    write_shard, names = writer._write_shard, []

    def failing(path, records, progress):
        if len(names) == 4:
            next(iter(records))
            path.with_name(path.name + ".part").write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        names.append(path.name)
        return write_shard(path, records, progress)

    monkeypatch.setattr(writer, "_write_shard", failing)
    assert "No space left on device; the same command continues" in cases.failed(
        capsys, 1, cases.command(tars, tmp_path)
    )
    assert not (tmp_path / "imagenet2012/5.1.0").exists()
    assert not tfds.builder("imagenet2012", data_dir=tmp_path, file_format="array_record").is_prepared()
    assert version.list_all_versions(tmp_path / "imagenet2012") == []
    incomplete = tmp_path / "imagenet2012/5.1.0.incomplete"
    before = {name: (incomplete / name).stat().st_mtime_ns for name in names}

    monkeypatch.setattr(writer, "_write_shard", lambda path, *rest: names.append(path.name) or write_shard(path, *rest))
    assert main(cases.command(tars, tmp_path)) == 0
    assert len(names) == len(set(names)) == 7  # six of training, one of validation, each once
    final = tmp_path / "imagenet2012/5.1.0"
    assert {name: (final / name).stat().st_mtime_ns for name in before} == before
    assert cases.read_shards(final) == whole


def test_unlisted_or_missing_shard_is_written_again(whole, tars, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(tfds.folder_dataset, "write_metadata", lambda **_: 1 / 0)
        main(cases.command(tars, tmp_path))
    incomplete = tmp_path / "imagenet2012/5.1.0.incomplete"
    (incomplete / "imagenet2012-train.array_record-00002-of-00006").unlink()
    written = (incomplete / "written.json").read_text()
    (incomplete / "written.json").write_text(written.replace("00003-of-00006", "00013-of-00006"))
    (incomplete / "imagenet2012-train.array_record-00003-of-00006").write_bytes(b"not to be believed")
    assert main(cases.command(tars, tmp_path)) == 0
    assert cases.read_shards(tmp_path / "imagenet2012/5.1.0") == whole


def test_changed_plan_is_refused_with_the_differences(tars, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(writer, "_write_shards", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    cases.failed(capsys, 1, cases.command(tars, tmp_path))
    files = cases.imagenet_files()
    files["train"]["n01440764_0.JPEG"] += b"\0"
    other = cases.imagenet_tars(tmp_path / "other", files)
    before = cases.read_shards(tmp_path / "imagenet2012/5.1.0.incomplete")
    line = cases.failed(capsys, 2, cases.command(other, tmp_path))
    assert f"source was '{tars}', is now '{other}'" in line and "splits.train.digest" in line
    assert "splits.validation" not in line
    assert f"remove {tmp_path}/imagenet2012/5.1.0.incomplete" in line
    assert cases.read_shards(tmp_path / "imagenet2012/5.1.0.incomplete") == before


def test_foreign_files_are_left_alone(tars, tmp_path, capsys):
    incomplete = tmp_path / "imagenet2012/5.1.0.incomplete"
    incomplete.mkdir(parents=True)
    (incomplete / "thesis.txt").write_text("all of it")
    assert "holds files but no plan.json" in cases.failed(capsys, 2, cases.command(tars, tmp_path))
    assert (incomplete / "thesis.txt").read_text() == "all of it"


def test_two_processes_do_not_meet(tars, tmp_path, capsys):
    incomplete = tmp_path / "imagenet2012/5.1.0.incomplete"
    incomplete.mkdir(parents=True)
    with (incomplete / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "is being written by another process" in cases.failed(capsys, 2, cases.command(tars, tmp_path))
    assert main(cases.command(tars, tmp_path)) == 0


def test_ctrl_c_ends_in_one_line_and_can_be_continued(whole, tars, tmp_path):
    script = """
import time
from mixedres._internal import files
from mixedres.data.prepare import spans
spans.shard_bounds = lambda part: [*range(5, len(part), 5), len(part)]
to_disk = files.to_disk
def slow(path):
    to_disk(path)
    if '00002-of' in path.name:
        print('now', flush=True)
        time.sleep(60)
files.to_disk = slow
sys.exit(main(sys.argv))"""
    with cases.start(script, cases.command(tars, tmp_path)) as process:
        assert process.stdout.readline() == "now\n"
        process.send_signal(signal.SIGINT)
        _, text = process.communicate(timeout=30)
    assert process.returncode == 130
    assert text == "mixedres: interrupted; the same command continues where this one stopped\n"
    assert len(list((tmp_path / "imagenet2012/5.1.0.incomplete").glob("*-of-?????"))) == 2
    assert main(cases.command(tars, tmp_path)) == 0
    assert cases.read_shards(tmp_path / "imagenet2012/5.1.0") == whole
