"""Writes tiny tar files of ImageNet as a data set by the line of docs/imagenet.md, and reads the data set.

python .ci/documented_imagenet.py TFDS: TFDS is the program `tfds` of an environment with TensorFlow.
"""

import io
import pathlib
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile

import numpy as np
from PIL import Image

from mixedres import data

LABELS = {"n01440764": 0, "n02105855": 230, "n15075141": 999}  # the first, one in the middle, and the last
VALIDATION_LABELS = [65, 970, 230, 809, 516]  # of ILSVRC2012_val_00000001.JPEG to 5, as published


def jpeg(seed: int) -> bytes:
    """Returns a JPEG of random pixels."""
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (24, 30, 3), np.uint8)).save(buffer, "JPEG")
    return buffer.getvalue()


def tar(files: dict[str, bytes]) -> bytes:
    """Returns a tar archive of files by name."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


page = pathlib.Path(__file__).parents[1] / "docs" / "imagenet.md"
line = re.search(r"^    tfds (build imagenet2012 .*)$", page.read_text(), re.MULTILINE)
assert line is not None
with tempfile.TemporaryDirectory() as work:
    downloads = pathlib.Path(work, "DOWNLOADS")
    downloads.mkdir()
    train = {f"{name}.tar": tar({f"{name}_{i}.JPEG": jpeg(i) for i in range(3)}) for name in LABELS}
    tests = {f"ILSVRC2012_val_{i + 1:08d}.JPEG": jpeg(i) for i in range(5)}
    (downloads / "ILSVRC2012_img_train.tar").write_bytes(tar(train))
    (downloads / "ILSVRC2012_img_val.tar").write_bytes(tar(tests))
    subprocess.run([sys.argv[1], *shlex.split(line[1])], cwd=work, check=True, capture_output=True)
    source = data.load("imagenet2012", dir=f"{work}/DATA", image_size=16, batch_size=9)
    assert (source.train_examples, source.eval_examples, source.num_classes) == (9, 5, 1000)
    assert sorted(next(source.train_batches(9, seed=0))["label"].tolist()) == sorted(3 * [*LABELS.values()])
    evaluated = [label for batch in source.eval_batches(5) for label in batch["label"].tolist()]
    assert sorted(evaluated) == sorted(VALIDATION_LABELS)
print("tfds build wrote a data set that mixedres reads")
