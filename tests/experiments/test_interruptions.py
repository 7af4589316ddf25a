"""A run that was killed in every way in turn ends with the bits of one that was not, and leaves nothing behind."""

import random

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
    shared = set(interruptions.SHARED_MEMORY.iterdir())
    interruptions.finish(options, tmp_path / "whole")
    found = interruptions.disturbed(tmp_path / "run", options, list(interruptions.KINDS.values()))
    assert found["statuses"] == [-9, 143]
    assert interruptions.outcome(tmp_path / "run") == interruptions.outcome(tmp_path / "whole")
    assert set(interruptions.SHARED_MEMORY.iterdir()) <= shared
