"""A run that was killed in every way in turn ends with the bits of one that was not, and leaves nothing behind."""

import random
import threading

import pytest

from experiments import interruptions

pytestmark = pytest.mark.slow
LENGTH = ("--config.batch_size=8", "--config.steps=300")


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """Of a run on images."""
    folder = tmp_path_factory.mktemp("images")
    interruptions.images(folder / "images")
    return ("--config=folder:fp16,model=cifar_resnet8", f"--config.data.dir={folder / 'images'}", *LENGTH)


def test_killed_in_every_way(options, tmp_path):
    random.seed(0)
    before = interruptions.shared_memory()
    interruptions.finish(options, tmp_path / "whole")
    found = interruptions.disturbed(tmp_path / "run", options, list(interruptions.KINDS.values()))
    assert found["statuses"] == [-9, 143]
    assert interruptions.outcome(tmp_path / "run") == interruptions.outcome(tmp_path / "whole")
    assert interruptions.left_in_shared_memory(before) == []


def test_shared_memory_that_stays_is_found_and_that_of_a_program_beside_it_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(interruptions, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(interruptions, "PATIENCE_WITH_OTHERS", 1.0)
    (tmp_path / "from_before").touch()
    before = interruptions.shared_memory()
    for name in ("left", "of_another"):
        (tmp_path / name).touch()
    ending = threading.Timer(0.2, (tmp_path / "of_another").unlink)
    ending.start()
    assert interruptions.left_in_shared_memory(before) == [str(tmp_path / "left")]
    ending.join()
