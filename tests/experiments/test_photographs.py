"""The collection of photographs and the table of contenders; the trainings are replaced."""

import json

import numpy as np
import pytest
import scipy.stats
from PIL import Image

from experiments import photographs
from experiments.lib import runs


def test_collection_is_the_same_every_time(tmp_path, monkeypatch):
    monkeypatch.setattr(photographs, "SKIMAGE", ("coffee", "chelsea"))
    monkeypatch.setattr(photographs, "BACKGROUNDS", tmp_path / "none")
    assert photographs.collect(tmp_path / "a") == photographs.collect(tmp_path / "b") == 4
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").glob("*/*/*.jpg"))
    assert [sum(path.parts[0] == part for path in files) for part in ("train", "val")] == [4 * 16, 4 * 4]
    assert all((tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes() for path in files)
    sizes = [Image.fromarray(np.asarray(Image.open(tmp_path / "a" / path))).size for path in files]
    assert all(width == height and 44 <= width <= 192 for width, height in sizes)


def test_contenders_are_compared_with_torchvision(tmp_path, monkeypatch, capsys):
    top1 = {"ours": [0.90, 0.93, 0.91], "torchvision": [0.90, 0.91, 0.92]}
    given = []

    def ours(root, seed, *more):
        given.append(more)
        return top1["ours"][seed]

    monkeypatch.setattr(photographs, "collect", lambda root, crops: 36)
    monkeypatch.setattr(runs, "RESULTS", tmp_path)
    monkeypatch.setattr(photographs.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(photographs.CONTENDERS, "ours", ours)
    monkeypatch.setitem(photographs.CONTENDERS, "torchvision", lambda root, seed: top1["torchvision"][seed])
    arguments = ["--seeds=3", "--contenders=ours,torchvision", "--set=data.crop_area=0.5,epochs=9"]
    assert photographs.main(arguments) == 0
    assert [*dict.fromkeys(given)] == [(), ("--config.data.crop_area=0.5", "--config.epochs=9")]
    first, last, _ = json.loads((tmp_path / "photographs.json").read_text())["rows"]
    test = scipy.stats.ttest_ind(*(100 * np.array(top1[name]) for name in top1), equal_var=False)
    assert first["interval"] == pytest.approx(test.confidence_interval()) and "interval" not in last
    assert f"{first['difference']:+.1f} ({first['interval'][0]:+.1f} to " in capsys.readouterr().out
