"""The collection of photographs."""

import numpy as np
from PIL import Image

from experiments import photographs


def test_collection_is_the_same_every_time(tmp_path, monkeypatch):
    monkeypatch.setattr(photographs, "SKIMAGE", ("coffee", "chelsea"))
    monkeypatch.setattr(photographs, "BACKGROUNDS", tmp_path / "none")
    assert photographs.collect(tmp_path / "a") == photographs.collect(tmp_path / "b") == 4
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").glob("*/*/*.jpg"))
    assert [sum(path.parts[0] == part for path in files) for part in ("train", "val")] == [4 * 16, 4 * 4]
    assert all((tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes() for path in files)
    sizes = [Image.fromarray(np.asarray(Image.open(tmp_path / "a" / path))).size for path in files]
    assert all(width == height and 44 <= width <= 192 for width, height in sizes)
