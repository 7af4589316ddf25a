"""The loader of images in threads: permutations, continuations, hosts, masks, and images that cannot be read."""

import contextlib
import math
import pathlib
import shutil
import threading
import time

import numpy as np
import pytest
from PIL import Image, ImageOps

from mixedres._internal.errors import DataError
from mixedres.data import Dataset, Example, Options, Prefetch, load
from mixedres.data.images import chunks
from mixedres.data.images.loader import Loader
from tests.data import batch_cases as cases
from tests.data import made
from tests.data.batch_cases import same, take
from tests.interruptions.runs import wait_until

TRAIN, TEST, SIZE = 50, 21, 16


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("images")
    made.write_folder(path, TRAIN)
    made.write_folder(path, TEST, "val")
    return path


@pytest.fixture
def copy(root, tmp_path):
    """One that may be damaged."""
    return shutil.copytree(root, tmp_path / "copy")


def opened(root, **options):
    usual = {"dir": str(root), "image_size": SIZE, "batch_size": 8, "threads": 2, "flip": True}
    return load("folder", **usual | options)


def ids(images, count):
    """Which image every square shows, by its red."""
    known = np.array([made.colored(index, count)[0] for index in range(count)])
    distance = np.abs(np.median(images[..., 0], (1, 2))[:, None] - known)
    assert distance.min(1).max() <= 1.5
    return distance.argmin(1)


def labels(indices, count):
    return indices * len(made.CLASSES) // count


def test_every_epoch_is_a_permutation(root):
    batches = take(opened(root), 7, 3 * (TRAIN // 7), seed=4)
    found = [ids(batch["image"], TRAIN) for batch in batches]
    cases.check_epochs(found, TRAIN, seed=4)
    for batch, indices in zip(batches, found, strict=True):
        np.testing.assert_array_equal(batch["label"], labels(indices, TRAIN))
        batch["image"][:] = 0  # it is the receiver's


@pytest.mark.parametrize(("threads", "chunk"), [(1, 32), (16, 32), (None, 5), (2, 1), (2, 100)])
def test_batches_do_not_depend_on_threads_or_chunks(root, monkeypatch, threads, chunk):
    source = opened(root, threads=2)
    train, test = take(source, 40, 5, seed=3), list(source.eval_batches(9))
    monkeypatch.setattr(chunks, "CHUNK", chunk)
    source = opened(root, threads=threads)
    assert same(take(source, 40, 5, seed=3), train) and same(list(source.eval_batches(9)), test)


def test_rows_steps_and_seeds_are_cropped_independently(tmp_path):
    data = made.encoded(made.photo(60, 60), quality=95)
    made.write_files(
        tmp_path, {f"{part}/{'ab'[index % 2]}/{index}.jpg": data for part in ("train", "val") for index in range(40)}
    )
    source = opened(tmp_path, flip=False)
    batches = take(source, 40, 2, seed=0) + take(source, 40, 2, seed=1)
    assert len({image.tobytes() for batch in batches for image in batch["image"]}) > 155


@pytest.mark.parametrize(("batch_size", "firsts"), [(8, (1, 6, 9)), (40, (1, 2))])
def test_run_continues_at_any_step(root, batch_size, firsts):
    # Within an epoch, at its edge, and an epoch later.
    cases.check_continuation(opened(root), batch_size, firsts[-1] + 1, firsts, again=opened(root, threads=3))


@pytest.mark.parametrize(("hosts", "batch_size"), [(2, 40), (4, 8)])
def test_hosts_have_the_rows_of_the_global_batch(root, hosts, batch_size):
    cases.check_hosts(opened(root), batch_size, hosts, firsts=(2,))


@pytest.mark.parametrize("batch_size", [8, 40])
def test_evaluation_sees_every_image_once_in_order(root, batch_size):
    images, found = cases.evaluated(opened(root), batch_size)
    np.testing.assert_array_equal(ids(images, TEST), range(TEST))
    np.testing.assert_array_equal(found, labels(np.arange(TEST), TEST))


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Two images, one of them to be turned."""
    path = tmp_path_factory.mktemp("photos")
    for index, orientation in enumerate((1, 6)):
        noise = np.random.default_rng(index).integers(-60, 60, (90, 140, 1))
        pixels = np.clip(made.photo(90, 140, index) + noise, 0, 255).astype(np.uint8)
        data = made.turned(Image.fromarray(pixels), orientation, quality=95, subsampling=0)
        made.write_files(path, {f"{part}/{'ab'[index]}/{index}.jpg": data for part in ("train", "val")})
    return path


@pytest.mark.parametrize("family", ["torch", "official", "official_fast"])
def test_evaluation_shows_the_middle_of_the_upright_image(photos, family):
    [batch] = opened(photos, preprocessing=family, image_size=50).eval_batches(2)
    for index, image in enumerate(batch["image"]):
        stored = Image.open(photos / "val" / "ab"[index] / f"{index}.jpg")
        upright = np.asarray(ImageOps.exif_transpose(stored))
        assert upright.shape[:2] == ((90, 140), (140, 90))[index]
        y, x = (5, 30) if not index else (30, 5)  # 79 pixels, which are 87.5 % of 90
        part = upright[y : y + 79, x : x + 79]
        references = {"torch": made.average(part, 50), "official_fast": made.bilinear(part, 50)}
        # Of 57 rows, which 90 become, 50; of the columns as many.
        new = [int(side * 57 / 90) for side in upright.shape[:2]]
        references["official"] = made.legacy(upright, new)[tuple(slice((n - 50) // 2, (n - 50) // 2 + 50) for n in new)]
        # Noise shows that the DCT of `official` is another one than Pillow's.
        assert made.difference(image, references.pop(family)).max() <= (6 if family == "official" else 3)
        assert all(made.difference(image, other).max() > 20 for other in references.values())


def test_flip_option_changes_only_flips(photos):
    plain, flipped = (take(opened(photos, flip=flip, image_size=8), 2, 60) for flip in (False, True))
    mirrored = []
    for a, b in zip(plain, flipped, strict=True):
        np.testing.assert_array_equal(a["label"], b["label"])
        for x, y in zip(a["image"], b["image"], strict=True):
            kept = np.array_equal(x, y)
            assert kept or np.array_equal(x[:, ::-1], y)
            mirrored.append(not kept)
    assert abs(np.sum(mirrored) - 60) <= 4 * math.sqrt(120) / 2


def test_gray_images_have_one_channel():
    photos = [made.photo(32, 32, index, channels=1) for index in range(6)]
    part = made.Part(Example(made.encoded(photo, "PNG"), index) for index, photo in enumerate(photos))
    names = tuple("abcdef")
    source = Loader(Dataset(part, part, names, channels=1), Options(6, image_size=28))
    assert source.image_shape == (28, 28, 1) and source.class_names == names
    assert source.mean == (pytest.approx(114.495),) and source.std == (pytest.approx(57.63),)
    [batch] = source.eval_batches(6)
    np.testing.assert_array_equal(batch["image"], [photo[2:30, 2:30] for photo in photos])
    assert take(source, 3, 2)[1]["image"].shape == (3, 28, 28, 1)


def path_of(root, index, part="train"):
    [path] = (root / part).glob(f"*/{index:03d}.*")
    return path


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-40])


# How a file is spoiled, and what is said of it.
BROKEN = {"cut off": (cut_off, ""), "removed": (pathlib.Path.unlink, "No such file or directory")}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("part", ["train", "val"])
def test_message_names_file_and_reason(copy, kind, part):
    source = opened(copy)
    spoil, reason = BROKEN[kind]
    path = path_of(copy, 13, part)
    spoil(path)
    with pytest.raises(DataError) as error:
        take(source, 25, 2) if part == "train" else list(source.eval_batches(8))
    text = str(error.value)
    assert text.startswith(f"{path}: {reason}") and "\n" not in text
    assert "; repair or delete the file, or skip such images with --config.data.on_error=skip" in text


def test_label_out_of_range_is_refused(root):
    source = opened(root)
    source.num_classes = 2
    for read in (lambda: take(source, 25, 2), lambda: list(source.eval_batches(8))):
        with pytest.raises(DataError, match=r"^/.*: label 2 is not in 0 to 1; repair or delete the file"):
            read()


def test_batches_before_an_unreadable_image_arrive(copy):
    order = np.random.default_rng((0, 0, 0)).permutation(TRAIN)
    source = opened(copy)
    whole = take(source, 10, 5)
    cut_off(path_of(copy, order[33]))
    got = []
    with (
        pytest.raises(DataError, match=str(path_of(copy, order[33]))),
        Prefetch(source.train_batches(10, seed=0), lambda x: x) as batches,
    ):
        got.extend(batches)
    assert same(got, whole[:3])


@pytest.mark.parametrize("kind", BROKEN)
def test_in_training_the_next_readable_image_takes_the_place(copy, kind):
    whole = take(opened(copy), 25, 4)
    source = opened(copy, on_error="skip")
    assert same(take(source, 25, 4), whole) and source.unreadable == {}
    for index in (13, 48, 49):  # 48 and 49 are followed by 0
        BROKEN[kind][0](path_of(copy, index))
    batches = take(source, 25, 4)
    for batch, before in zip(batches, whole, strict=True):
        found, wanted = ids(batch["image"], TRAIN), ids(before["image"], TRAIN)
        replaced = np.isin(wanted, (13, 48, 49))
        np.testing.assert_array_equal(found, np.where(wanted == 13, 14, np.where(wanted >= 48, 0, wanted)))
        np.testing.assert_array_equal(batch["label"], labels(found, TRAIN))
        np.testing.assert_array_equal(batch["image"][~replaced], before["image"][~replaced])
    assert source.unreadable.keys() == set(map(source.data_set.train.file_name, (13, 48, 49)))
    assert all(BROKEN[kind][1] in reason for reason in source.unreadable.values())


@pytest.mark.parametrize("kind", BROKEN)
def test_in_evaluation_an_unreadable_image_does_not_count(copy, kind):
    source = opened(copy, on_error="skip")
    whole = list(source.eval_batches(8))
    paths = [path_of(copy, index, "val") for index in (3, 20)]
    for path in paths:
        BROKEN[kind][0](path)
    batches = list(source.eval_batches(8))
    mask = np.concatenate([batch["mask"] for batch in batches])
    assert mask.tolist() == [index < TEST and index not in (3, 20) for index in range(24)]
    for batch, before in zip(batches, whole, strict=True):
        for key in ("image", "label"):
            np.testing.assert_array_equal(batch[key][batch["mask"]], before[key][batch["mask"]])
            assert not batch[key][~batch["mask"]].any()
    assert set(source.unreadable) == set(map(str, paths))


def test_data_set_without_readable_images_is_refused(copy):
    for path in copy.glob("*/*/*"):
        path.write_text("no image")
    source = opened(copy, on_error="skip")
    with pytest.raises(DataError, match="in a row cannot be used, from example"):
        take(source, 10, 1)
    batches = list(source.eval_batches(8))
    assert len(batches) == 3 and not any(batch["mask"].any() for batch in batches)


def test_closing_early_ends_the_threads(root):
    before = threading.active_count()
    for used in (0, 1, 3):
        batches = opened(root).train_batches(10, seed=0)
        for _ in range(used):
            next(batches)
        batches.close()
    with Prefetch(opened(root).train_batches(10, seed=0), lambda x: x) as batches:
        next(batches)
    assert wait_until(lambda: threading.active_count() <= before), threading.enumerate()


def test_loader_reads_only_the_images_of_the_batches(root, monkeypatch):
    # Memory under way: a few chunks, however long the run.
    source, reads = opened(root, threads=2), []
    images = type(source.data_set.train)
    read = images.__getitem__
    monkeypatch.setattr(images, "__getitem__", lambda self, index: reads.append(index) or read(self, index))
    with contextlib.closing(source.train_batches(40, seed=0)) as batches:
        next(batches)
        time.sleep(0.3)
        assert 40 <= len(reads) <= 40 * 6
