"""The whole way, as a person with a folder of photographs goes it: one command, real JPEGs, held-out crops."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import skimage.data
import sklearn.datasets
from PIL import Image

from tests import ROOT

CROPS, SIDE = 80, 96


@pytest.mark.nightly
def test_folder_of_photographs_is_learned(tmp_path):
    """Ten photographs as classes, each with 80 random crops of 96 pixels as JPEGs."""
    folder = tmp_path / "photographs"
    pictures = {name: getattr(skimage.data, name)() for name in ("astronaut", "coffee", "rocket", "grass", "brick")}
    pictures |= {"cat": skimage.data.chelsea(), "galaxies": skimage.data.hubble_deep_field()}
    pictures |= {"tissue": skimage.data.immunohistochemistry()}
    pictures |= {name: sklearn.datasets.load_sample_image(f"{name}.jpg") for name in ("china", "flower")}
    rng = np.random.default_rng(0)
    for name, picture in pictures.items():
        (folder / name).mkdir(parents=True)
        for index in range(CROPS):
            y, x = (rng.integers(side - SIDE + 1) for side in picture.shape[:2])
            Image.fromarray(picture[y : y + SIDE, x : x + SIDE]).save(folder / name / f"{index}.jpg", quality=92)

    command = [sys.executable, "-m", "mixedres.main", f"--config={ROOT}/configs/folder.py:fp16,model=cifar_resnet8"]
    command += [f"--config.data.dir={folder}", "--config.data.image_size=32", "--config.batch_size=32"]
    # One device: of eight, each would see four images for its batch statistics.
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 600}
    done = subprocess.run([*command, "--config.epochs=16", "--config.eval_every=4"], **options)
    assert done.returncode == 0, done.stderr
    assert "10 classes; 20% of every class held out" in done.stdout
    summary = json.loads((tmp_path / "runs" / "folder-fp16" / "summary.json").read_text())
    assert summary["eval"]["examples"] == 10 * CROPS // 5
    assert summary["eval"]["top1"] > 0.85
    assert summary["unreadable_images"] == {"count": 0, "first": {}}
