"""Folders of images: what is found, how a part is held out, and what is wrong with a folder."""

import collections
import itertools
import os

import pytest

from mixedres import data
from tests.data import made


def fill(root, *paths):
    """Files whose content is their path."""
    made.write_files(root, {path: path.encode() for path in paths})


def pairs(part):
    """(path, label) of every example, as it is read."""
    found = [(part[index].image.decode(), part[index].label) for index in range(len(part))]
    assert [part.file_name(index) for index in range(len(part))] == [str(part.root / path) for path, _ in found]
    return found


def names(data_set, part):
    """{class: paths}."""
    found = collections.defaultdict(list)
    for path, label in pairs(getattr(data_set, part)):
        found[data_set.class_names[label]].append(path)
    return found


PARTS = [
    *(("train", "val"), ("Train", "Validation"), ("training", "testing"), ("TRAINING", "Evaluation")),
    *(("train", "validate"), ("train", "dev"), ("train2017", "val2017"), ("Train images", "Test images")),
    # As Kaggle's archives unpack.
    *(("seg_train/seg_train", "seg_test/seg_test"), ("training_set/training_set", "test_set/test_set")),
]


@pytest.mark.parametrize(("train", "test"), PARTS)
def test_train_and_val_folders_become_two_parts(tmp_path, train, test):
    fill(tmp_path, f"{train}/b/1.jpg", f"{train}/b/2.jpg", f"{train}/a/9.jpg", f"{train}/c/1.jpg")
    fill(tmp_path, f"{test}/c/4.jpg", f"{test}/b/3.jpg")  # not every class need be there
    data_set = data.scan(tmp_path)
    assert data_set.class_names == ("a", "b", "c")
    paths = (f"{train}/a/9.jpg", f"{train}/b/1.jpg", f"{train}/b/2.jpg", f"{train}/c/1.jpg")
    assert pairs(data_set.train) == list(zip(paths, (0, 1, 1, 2), strict=True))
    assert pairs(data_set.eval) == [(f"{test}/b/3.jpg", 1), (f"{test}/c/4.jpg", 2)]
    assert (data_set.channels, data_set.apply_exif) == (3, True)
    assert data_set.train.name == f"{tmp_path}/{train}" and data_set.eval.name == f"{tmp_path}/{test}"
    assert data_set.note.startswith(f"3 classes (a, b, c); trained on {train}, tested on {test}; class a has no test")


def test_folder_names_choose_the_parts(tmp_path):
    fill(tmp_path, "train/a/1.jpg", "train/b/1.jpg", "test/a/2.jpg", "val/a/3.jpg")
    fill(tmp_path, "learn/a/1.jpg", "learn/b/2.jpg", "check/b/3.jpg", "Train/a/0.jpg", "Train/b/0.jpg")
    assert pairs(data.scan(tmp_path).train)[0] == ("train/a/1.jpg", 0)  # not Train
    assert pairs(data.scan(tmp_path).eval) == [("val/a/3.jpg", 0)]  # the first of several
    assert pairs(data.scan(tmp_path, eval_split="test").eval) == [("test/a/2.jpg", 0)]
    data_set = data.scan(tmp_path, train_split="learn", eval_split="check")
    assert pairs(data_set.train) == [("learn/a/1.jpg", 0), ("learn/b/2.jpg", 1)]
    assert pairs(data_set.eval) == [("check/b/3.jpg", 1)]


def test_relative_place_and_the_home_directory(tmp_path, monkeypatch):
    fill(tmp_path / "data", "train/a/1.jpg", "train/b/1.jpg", "val/a/3.jpg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for place in ("data", "~/data", str(tmp_path / "data"), tmp_path / "data/"):
        data_set = data.scan(place)
        assert data_set.train.file_name(0) == f"{tmp_path}/data/train/a/1.jpg"
    monkeypatch.chdir("/")
    assert pairs(data_set.train) == [("train/a/1.jpg", 0), ("train/b/1.jpg", 1)]


KINDS = ["1.jpg", "2.JPG", "3.jpeg", "4.JPEG", "5.jfif", "6.png", "7.PnG", "8.webp"]
KINDS += ["9.tif", "a.TIFF", "b.bmp", "c.gif", "with space.jpg", "müßig.jpg", "a.b.jpg"]


def test_file_names_that_count_as_images(tmp_path):
    others = [".hidden.jpg", "9.heic", "readme.txt", "jpg", "x.jpg.part", "Thumbs.db", ".DS_Store", "y.tar.gz"]
    fill(tmp_path, *(f"train/ä b/{name}" for name in KINDS + others), "train/c/1.jpg", "val/c/1.jpg")
    fill(tmp_path, "train/.cache/1.jpg", "train/c/.thumbnails/1.jpg", "train/loose.jpg", "loose.jpg", "val/.x/1.jpg")
    data_set = data.scan(tmp_path)
    assert data_set.class_names == ("c", "ä b")
    assert pairs(data_set.train) == [("train/c/1.jpg", 0), *((f"train/ä b/{name}", 1) for name in sorted(KINDS))]


def test_images_in_subfolders_of_a_class_are_found(tmp_path):
    # A folder called like an image is none.
    deep = ["train/a/x/y/1.jpg", "train/a/0.jpg", "train/a/x/2.jpg", "train/a/3.jpg/4.jpg", "train/b/z/1.jpg"]
    fill(tmp_path, *deep, "val/a/x/3.jpg")
    data_set = data.scan(tmp_path)
    assert data_set.class_names == ("a", "b")
    assert pairs(data_set.train) == [(path, "ab".index(path[6])) for path in sorted(deep)]
    assert pairs(data_set.eval) == [("val/a/x/3.jpg", 0)]


def test_links_to_images_and_folders(tmp_path):
    fill(tmp_path, "away/a/1.jpg", "away/2.jpg", "away/c/5.jpg", "root/train/b/3.jpg", "root/val/b/4.jpg")
    links = {"a": "away/a", "b/2.jpg": "away/2.jpg", "b/c": "away/c"}
    links |= {"b/again": "root/train/b", "b/up": "root"}  # which repeat no image
    for link, target in links.items():
        os.symlink(tmp_path / target, tmp_path / "root/train" / link)
    data_set = data.scan(tmp_path / "root")
    assert data_set.class_names == ("a", "b")
    found = [tuple(data_set.train[index]) for index in range(len(data_set.train))]
    paths = (b"away/a/1.jpg", b"away/2.jpg", b"root/train/b/3.jpg", b"away/c/5.jpg")
    assert found == list(zip(paths, (0, 1, 1, 1), strict=True))


def one_folder(root, sizes, part=""):
    fill(root, *(f"{part}{name}/{index:03d}.jpg" for name, size in sizes.items() for index in range(size)))


def held_out(root, **options):
    return {path for path, _ in pairs(data.scan(root, **options).eval)}


@pytest.mark.parametrize(("share", "percent"), [(0.2, "20%"), (0.5, "50%"), (0.01, "1%"), (0.9, "90%")])
@pytest.mark.parametrize("part", ["", "train/"])
def test_share_of_every_class_is_held_out(tmp_path, share, percent, part):
    sizes = {"a": 50, "b": 7, "c": 2, "d": 113}
    one_folder(tmp_path, sizes, part)
    data_set = data.scan(tmp_path, eval_fraction=share)
    train, test = names(data_set, "train"), names(data_set, "eval")
    for name, size in sizes.items():
        assert len(test[name]) == min(max(round(share * size), 1), size - 1)
        assert sorted(train[name] + test[name]) == [f"{part}{name}/{index:03d}.jpg" for index in range(size)]
        assert train[name] == sorted(train[name]) and test[name] == sorted(test[name])
    assert f"; {percent} of every class held out for testing (data.eval_fraction={share:g}, " in data_set.note
    assert data_set.train.name.endswith(" (train)") and data_set.eval.name.endswith(" (held-out)")


def test_held_out_images_are_fixed_by_golden_names(tmp_path, monkeypatch):
    """Wherever the folder is, and in whatever order its files come. Results are comparable as long as this stays."""
    one_folder(tmp_path, {"cat": 20, "dog": 3})
    walk = os.walk
    for order in (1, -1):
        turned = lambda *args, order=order, **kw: ((p, d, f[::order]) for p, d, f in walk(*args, **kw))  # noqa: E731
        monkeypatch.setattr(os, "walk", turned)
        assert held_out(tmp_path) - {f"dog/00{index}.jpg" for index in range(3)} == {
            f"cat/{index}.jpg" for index in ("000", "005", "014", "015")
        }


def test_seed_changes_the_held_out_images(tmp_path):
    one_folder(tmp_path, {"a": 200, "b": 2})
    found = [{p for p in held_out(tmp_path, split_seed=seed) if p.startswith("a")} for seed in range(5)]
    assert [len(paths) for paths in found] == [40] * 5
    assert max(len(a & b) for a, b in itertools.combinations(found, 2)) <= 18  # 8 are in both by chance
    assert found[3] <= held_out(tmp_path, split_seed=3)


def test_new_images_hardly_move_old_ones(tmp_path):
    one_folder(tmp_path, {"a": 200, "b": 100})
    before = held_out(tmp_path)
    fill(tmp_path, *(f"a/new{index}.jpg" for index in range(20)))
    after = held_out(tmp_path)
    old = {path for path in after if "new" not in path}
    assert {path for path in before ^ old if path.startswith("b")} == set()
    assert len(before ^ old) <= 10  # a share of 20 new ones moves some at the edge
    assert after < held_out(tmp_path, eval_fraction=0.3)


def test_class_of_one_image_is_only_for_training(tmp_path):
    one_folder(tmp_path, {"a": 1, "b": 5})
    data_set = data.scan(tmp_path)
    assert names(data_set, "train")["a"] == ["a/000.jpg"] and set(names(data_set, "eval")) == {"b"}
    assert data_set.note.endswith("; class a has no test image, so its accuracy stays unknown")
    one_folder(tmp_path / "c", {"a": 1, "b": 1})
    assert made.message(data.scan, tmp_path / "c").endswith(" has one image a class, which leaves none to test with")


def test_classes_without_images(tmp_path):
    fill(tmp_path, "a/1.jpg", "b/readme.txt")
    assert made.message(data.scan, tmp_path).endswith("): b; fill or remove them")
    fill(tmp_path, "b/1.heic", "b/.2.heic", "b/x/2.HEIC", "b/3.nef")
    assert made.message(data.scan, tmp_path).endswith("): b; 2 .heic, 1 .nef are not read: convert them to .jpg")


LOOSE, AMONG = "has images but no class folders", "the training part must have all classes of the test part"
REFUSED = {
    "": "has no class folders; put the images in one folder a class, as in {0}/cat/1.jpg",
    "1.jpg .hidden/2.jpg": LOOSE,
    "train/1.jpg val/2.jpg": f"{{0}}/train {LOOSE}",
    # As Kaggle's competitions have it.
    "train/a/1.jpg train/b/1.jpg test/2.jpg": "--config.data.dir={0}/train holds out a part of it",
    "a/1.jpg a/2.jpg": "{0} has one class, a",
    "train/a/1.jpg val/a/1.jpg": "{0}/train has one class, a",
    "train/cafe\u0301/1.jpg train/caf\u00e9/1.jpg": "{0}/train has the class caf\u00e9 in two Unicode spellings",
    "train/a/1.jpg val/z/1.jpg val/y/1.jpg": f"{{0}}/val has 2 classes that {{0}}/train does not have: y, z; {AMONG}",
    "val/a/1.jpg x/a/1.jpg": "a folder val, but no folder train beside it; if val is a class, type --config.data.train",
    "train/1.jpg car/1.jpg": "/cat/1.jpg; if train is a class, type --config.data.train_split=.",
}


@pytest.mark.parametrize("paths", REFUSED)
def test_folders_without_classes_or_training_are_refused(tmp_path, paths):
    fill(tmp_path, *paths.split())
    assert REFUSED[paths].format(tmp_path) in made.message(data.scan, tmp_path)


TABLES = {
    "train-0.parquet": "; train-0.parquet: images in tables are not read, so write each image of datasets.load",
    "data/train-0.parquet data/test-0.parquet README.md": "; data/test-0.parquet, data/train-0.parquet: im",
    "a.arrow state.json": "; a.arrow: images in tables are not read",
    "1.jpg labels.csv": "; labels.csv: tables of classes are not read, so move each image into the folder of",
    "images/1.jpg images/2.jpg labels.TSV": "; labels.TSV: tables of classes are not read",
    "train/1.jpg test/2.jpg train.csv sample.csv": "; sample.csv, train.csv: tables of classes are not",
    "train/1.jpg train/metadata.jsonl": "; train/metadata.jsonl: tables of classes are not read, so move",
    "a/.hidden.csv b/x.md": "fill or remove them",
}


@pytest.mark.parametrize("paths", TABLES)
def test_tables_in_place_of_class_folders_are_named(paths, tmp_path):
    made.write_files(tmp_path, dict.fromkeys(paths.split(), b""))
    message, words = made.message(data.scan, tmp_path), TABLES[paths]
    assert words in message and (words[0] == ";" or message.endswith(words))


def test_class_with_the_name_of_a_part(tmp_path):
    paths = [f"{name}/{n}.jpg" for name in ("car", "test", "train") for n in range(5)]
    fill(tmp_path / "flat", *paths)
    data_set = data.scan(tmp_path / "flat", train_split=".")
    assert data_set.class_names == ("car", "test", "train") and len(data_set.train) == 12 and len(data_set.eval) == 3
    fill(tmp_path / "parts", *(f"{part}/{path}" for part in ("train", "test") for path in paths))
    assert data.scan(tmp_path / "parts").class_names == ("car", "test", "train")


def test_folders_beside_the_parts_are_named(tmp_path):
    fill(tmp_path, *(f"{part}/{label}/1.jpg" for part in ("train", "val", "test") for label in "ab"), "extra/1.jpg")
    note = "2 classes (a, b); trained on train, tested on val; left out beside the parts: extra, test"
    assert data.scan(tmp_path).note == note
    fill(tmp_path / "one", "train/a/1.jpg", "train/a/2.jpg", "train/b/1.jpg", "train/b/2.jpg", "x/1.jpg")
    note = data.scan(tmp_path / "one").note
    assert note.startswith("2 classes (a, b); trained on train; 20% of every class held out for testing (")
    assert note.endswith("; left out beside the parts: x")


def test_folder_unpacked_twice_is_entered(tmp_path):
    paths = ("train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg")
    fill(tmp_path, *(f"data/data/{path}" for path in paths), "data/readme.txt", "__MACOSX/data/._1.jpg")
    data_set = data.scan(tmp_path)
    assert (data_set.train.root, data_set.class_names) == (tmp_path / "data" / "data", ("a", "b"))
    assert f"; {tmp_path} has one folder alone, so {tmp_path}/data/data is taken; " in data_set.note


def test_folders_of_systems_and_loose_images_are_left_out(tmp_path):
    one_folder(tmp_path, {"a": 5, "b": 5})
    system = ("@eaDir/1.jpg", "a/@eaDir/2.jpg", "lost+found/x/1.jpg", "$RECYCLE.BIN/3.jpg", "__MACOSX/a/._1.jpg")
    fill(tmp_path, *system, "loose.jpg", "a/1.avif")
    data_set = data.scan(tmp_path)
    assert data_set.class_names == ("a", "b") and len(data_set.train) + len(data_set.eval) == 10
    assert data_set.note.split("; ")[2:] == [
        "1 .avif is not read: convert it to .jpg",
        "folders of the system are left out: $RECYCLE.BIN, @eaDir, __MACOSX, lost+found",
        "1 image beside the class folders left out",
    ]


def test_parts_with_other_unicode_spellings_have_the_same_classes(tmp_path):
    fill(tmp_path, "train/caf\u00e9/1.jpg", "train/tea/1.jpg", "val/cafe\u0301/2.jpg")
    data_set = data.scan(tmp_path)
    assert data_set.class_names == ("caf\u00e9", "tea")
    assert pairs(data_set.eval) == [("val/cafe\u0301/2.jpg", 0)]


def test_name_in_another_encoding(tmp_path):
    one_folder(tmp_path, {"a": 5, "b": 2})
    (tmp_path / "a" / os.fsdecode(b"\xff\xfe.jpg")).write_bytes(b"x")
    data_set = data.scan(tmp_path)
    assert len(data_set.train) + len(data_set.eval) == 8
