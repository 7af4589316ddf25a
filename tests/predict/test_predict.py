"""Prediction: what the network of a run says of files is what its evaluation says of the same pictures."""

import base64
import csv
import html
import io
import json
import os
import pathlib
import re
import shutil
import types

import jax
import numpy as np
import pytest
from PIL import Image, ImageOps

import mixedres
from mixedres import checkpoints, data, main, predict, registry
from mixedres._internal.errors import ConfigError
from mixedres.predict import find_images
from tests import run_command
from tests.data import made
from tests.predict import chosen, said
from tests.train import run_cases
from tests.train.run_cases import build

SQUARE = np.zeros((2, 2, 1), np.uint8)
pytestmark = pytest.mark.usefixtures("small_network")


@pytest.mark.parametrize("preset", [None, "fp16_rewrite"])
def test_probabilities_equal_the_evaluation(preset, place, capsys):
    """21 images in batches of 8, the last of which is not full, on eight devices."""
    options = ["--json", "--batch_size=8", "--topk=9"] + ([f"--precision={preset}"] if preset else [])
    status, lines, _ = said(capsys, f"--from={place / 'run'}", place / "images" / "val", *options)
    found = [json.loads(line) for line in lines]
    assert status == 0 and len(found) == 21

    experiment = build(run_cases.on_images(place, preset or "fp16"))
    variables = checkpoints.read_weights(place / "run").variables()
    forward = experiment.precision.rewrite(lambda images: experiment.model.apply(variables, images, train=False))
    apply_fn = jax.jit(forward)
    batches = list(experiment.source.eval_batches(16))
    expected = np.concatenate([jax.nn.softmax(apply_fn(experiment.normalize_fn(b["image"]))) for b in batches])
    # The data set goes class by class, as the folder does.
    paths = [experiment.source.data_set.eval.file_name(index) for index in range(21)]
    assert [line["file"] for line in found] == paths
    for line, expected_row in zip(found, expected, strict=False):
        top = line["top"]
        assert [guess["class"] for guess in top] == [experiment.source.class_names[guess["index"]] for guess in top]
        shares = [guess["probability"] for guess in top]
        np.testing.assert_allclose(shares, -np.sort(-expected_row), rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(shares, expected_row[[guess["index"] for guess in top]], rtol=1e-3, atol=1e-6)
        assert sum(shares) == pytest.approx(1, abs=1e-6)  # the softmax is float32 whatever the network computes in


def test_files_folders_and_globs_each_once_and_in_order(place, tmp_path, capsys):
    root = place / "images" / "val"
    first, *rest = sorted(str(path) for path in (root / made.CLASSES[1]).iterdir())
    assert find_images(first) == [first]
    assert find_images(str(root / made.CLASSES[1])) == [first, *rest]
    assert find_images(f"{root}/{made.CLASSES[1]}/*") == [first, *rest]
    assert find_images(f"{root}/{made.CLASSES[1][:-1]}?") == [first, *rest]  # a folder that a glob matches
    assert find_images(f"{root}/**/{first.rsplit('/', 1)[1]}") == [first]
    (tmp_path / "empty").mkdir()
    for name in (".hidden.jpg", "b.jpg", "a.txt", "empty/c.heic"):
        (tmp_path / name).touch()
    assert find_images(str(tmp_path)) == [str(tmp_path / "b.jpg")]
    assert capsys.readouterr().err == f"note: {tmp_path}: 1 .heic is not read: convert it to .jpg\n"
    assert find_images(f"{tmp_path}/[!a]*") == [str(tmp_path / "b.jpg")]  # and a folder without a picture


def test_unreadable_files_are_reported_and_the_rest_predicted(place, tmp_path, capsys):
    shutil.copytree(place / "images" / "val" / made.CLASSES[0], tmp_path / "some")
    (tmp_path / "some" / "000a.jpg").write_text("no picture")
    (tmp_path / "some" / "000b.jpg").write_bytes(made.encoded(made.photo(40, 40))[:300])
    out = tmp_path / "sheet.html"
    for _ in range(2):  # the page of before is replaced
        status, lines, errors = said(capsys, f"--from={place / 'run'}", tmp_path / "some", "--json", f"--out={out}")
    assert "Not classified: 2 files<" in out.read_text()
    found = [json.loads(line) for line in lines]
    assert status == 1 and ["error" in line for line in found] == [False, True, True] + [False] * (len(found) - 3)
    assert all(("top" in line) != ("error" in line) for line in found) and len(found) > 4
    assert "000a.jpg: it is not an image in a known format" in errors
    assert errors.splitlines()[-1] == f"mixedres.predict: 2 of the {len(found)} files could not be classified"


def test_nothing_but_damaged_files_is_a_mistake(place, tmp_path, capsys):
    for name in ("a.jpg", "b.jpg"):
        (tmp_path / name).write_text("no picture")
    status, lines, errors = said(capsys, f"--from={place / 'run'}", tmp_path, f"--out={tmp_path / 'sheet.html'}")
    assert (status, lines) == (2, []) and "none of the 2 files could be classified" in errors
    assert not (tmp_path / "sheet.html").exists() and "a.jpg: it is not an image" in errors
    status, _, errors = said(capsys, f"--from={place / 'run'}", tmp_path / "a.jpg")
    assert status == 2 and errors.count("\n") == 1 and "a.jpg: it is not an image" in errors
    status, lines, _ = said(capsys, f"--from={place / 'run'}", tmp_path / "a.jpg", "--json")
    assert status == 2 and json.loads(lines[0])["error"] == "it is not an image in a known format"


def pictures(page):
    """The images of a page as arrays, in order."""
    uris = re.findall(r'src="data:image/[a-z]+;base64,([^"]+)"', page.read_text())
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(uri)))) for uri in uris]


def test_sheet_shows_photograph_input_and_truth(place, tmp_path, capsys):
    out, val = tmp_path / "sheet.html", place / "images" / "val"
    status, lines, errors = said(capsys, f"--from={place / 'run'}", val, f"--out={out}", "--json")
    guesses = [json.loads(line) for line in lines]
    right = sum(pathlib.Path(guess["file"]).parent.name == guess["top"][0]["class"] for guess in guesses)
    line = f"{right} of 21 test images right"
    assert status == 0 and f"{line}: {out}" in errors and f"<p>{line}</p>" in out.read_text()
    spec = data.InputSpec.from_json(json.loads((place / "run" / "data.json").read_text())["input"])
    drawn = pictures(out)
    assert len(drawn) == 42
    for photograph, seen, guess in zip(drawn[::2], drawn[1::2], guesses, strict=True):
        np.testing.assert_array_equal(seen, *data.center_crops([guess["file"]], spec, threads=1))
        upright = np.asarray(ImageOps.exif_transpose(Image.open(guess["file"])).convert("RGB"), float)
        assert np.abs(photograph - upright).mean() < 8  # one more JPEG
    names = re.findall(r'data-name="([^"]+)"', out.read_text())
    assert [*map(html.unescape, names)] == ["/".join(guess["file"].split("/")[-2:]) for guess in guesses]
    assert f'<h3 title="{guesses[0]["file"]}">{names[0]}</h3>' in out.read_text()
    losses = [float(loss) for loss in re.findall(r'data-loss="([^"]+)"', out.read_text())]
    for loss, guess in zip(losses, guesses, strict=True):
        label = pathlib.Path(guess["file"]).parent.name
        shares = [top["probability"] for top in guess["top"] if top["class"] == label]
        assert loss == pytest.approx(-np.log(shares[0]), rel=1e-4)


def test_sheet_counts_training_and_test_images_apart(place, tmp_path, capsys):
    out, images = tmp_path / "sheet.html", tmp_path / "images"

    def summary(*given):
        status, lines, errors = said(capsys, f"--from={place / 'run'}", *given, f"--out={out}", "--json")
        right = {
            path: json.loads(line)["top"][0]["class"] == pathlib.Path(path).parent.name
            for line in lines
            for path in [json.loads(line)["file"]]
        }
        assert status == 0
        marks = [out.read_text().count(f"a {part} image of the run<") for part in ("training", "test")]
        counts = [sum(right.values()), sum(ok for path, ok in right.items() if "/val/" in path)]
        return counts, marks, errors.splitlines()[-1].removesuffix(f": {out}")

    (right, tests), marks, line = summary(place / "images")
    assert marks == [24, 21] and line == f"{tests} of 21 test images, {right - tests} of 24 training images right"
    (right, _), marks, line = summary(place / "run" / ".." / "images" / "train")
    assert marks == [24, 0] and line == f"{right} of 24 training images right"
    shutil.copytree(place / "images", images)
    (right, tests), marks, line = summary(images)
    assert marks == [0, 0] and line == f"{right} of 45 right"
    _, marks, line = summary(images / "val", place / "images" / "val")
    assert marks == [0, 21] and line == f"{tests} of 21 test images, {tests} of 21 other images right"


def rows_of(path):
    """The rows of a table, as the standard library reads them."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def test_table_has_what_the_json_lines_have(place, tmp_path, capsys):
    out, some = tmp_path / "p.csv", tmp_path / "some"
    shutil.copytree(place / "images" / "val" / made.CLASSES[0], some / made.CLASSES[0])
    (some / made.CLASSES[0] / "bad.jpg").write_text("no picture")
    for _ in range(2):  # the table of before is replaced
        given = [f"--from={place / 'run'}", some, place / "images" / "val", "--json", f"--out={out}", "--topk=2"]
        status, lines, errors = said(capsys, *given)
    found, rows = [json.loads(line) for line in lines], rows_of(out)
    assert status == 1 and len(found) == len(rows) > 21 and [*tmp_path.glob("*.part")] == []
    of_class = ["class", "probability", "index"]
    columns = ["file", *of_class, *(f"{name}_2" for name in of_class), "true_class", "right", "part", "error"]
    assert list(rows[0]) == columns
    for line, row in zip(found, rows, strict=True):
        assert row["file"] == line["file"] and row["error"] == line.get("error", "")
        guesses = line.get("top", [])
        for guess, end in zip(guesses, ("", "_2"), strict=True) if guesses else ():
            read = {"class": row[f"class{end}"], "index": int(row[f"index{end}"])}
            assert read | {"probability": float(row[f"probability{end}"])} == guess
        truth = pathlib.Path(line["file"]).parent.name
        assert row["true_class"] == truth and row["part"] == ("" if line["file"].startswith(f"{some}") else "test")
        assert row["right"] == (str(guesses[0]["class"] == truth) if guesses else "")
        assert guesses or not any(row[name] for name in of_class)
    counts = [[row["right"] == "True" for row in rows if row["right"] and row["part"] == part] for part in ("test", "")]
    words = "{} of {} test images, {} of {} other images right"
    assert f"{words.format(*(f(c) for c in counts for f in (sum, len)))}: {out}\n" in errors


def test_table_keeps_names_and_holds_no_formula(tmp_path):
    names = ("a,b", 'he said "no"', "two\nlines", "=1+1", "+cmd|x", "-1", "@x", "café \ud800", "\r", "+")
    files = [f"{tmp_path}/x,\n.jpg", "=x.jpg", "@.jpg", "-1+1.jpg", os.fsdecode(b"b\xff.jpg"), *"abcde"]
    table = registry.OUTPUTS[".csv"](tmp_path / "p.csv")
    table.begin(types.SimpleNamespace(class_names=names), str(tmp_path), files, 1)
    for label, (file, name) in enumerate(zip(files, names, strict=True)):
        table.add(predict.Prediction(file, name, 0.1 + label, top=[(name, 0.1 + label)], labels=[label]), SQUARE)
    table.add(predict.Prediction("f", error="=no, really"), None)
    assert table.write() == "10 images"
    rows = rows_of(tmp_path / "p.csv")
    shown = ["a,b", 'he said "no"', "two\nlines", "'=1+1", "'+cmd|x", "-1", "'@x", "café \\ud800", "'\r", "'+"]
    assert [row["class"] for row in rows] == [*shown, ""] and rows[-1]["error"] == "'=no, really"
    assert [float(row["probability"]) for row in rows[:-1]] == [0.1 + label for label in range(10)]
    assert [row["file"] for row in rows[:5]] == [files[0], "./=x.jpg", "./@.jpg", "./-1+1.jpg", r"b\xff.jpg"]
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv(tmp_path / "p.csv", keep_default_na=False)
    assert list(frame["class"]) == [*shown, ""] and list(frame["file"]) == [row["file"] for row in rows]


@pytest.mark.parametrize("kind", [".csv", ".html"])
def test_file_of_another_program_is_not_replaced(kind, tmp_path):
    out = tmp_path / f"p{kind}"
    for content in (b"file,class\n", b"\xff\xfe", b""):
        out.write_bytes(content)
        with pytest.raises(ConfigError, match="exists, and predict did not write it; name another"):
            registry.OUTPUTS[kind](out)
        assert out.read_bytes() == content


def test_nearest_folder_with_the_name_of_a_class_is_the_truth(place, tmp_path, capsys):
    first, second = made.CLASSES[:2]
    picture = next((place / "images" / "val" / first).iterdir())
    folders = {f"{first}/sub folder": first, f"{first}/{second}/x/y": second, "none": "", f"{second}/{first}": first}
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
        shutil.copy(picture, tmp_path / folder / "x.jpg")
    paths = [tmp_path / folder / "x.jpg" for folder in folders]
    status, _, errors = said(capsys, f"--from={place / 'run'}", *paths, f"--out={tmp_path / 'p.csv'}")
    rows = rows_of(tmp_path / "p.csv")
    assert status == 0 and [row["true_class"] for row in rows] == list(folders.values())
    guess = rows[0]["class"]
    assert [row["right"] for row in rows] == [str(guess == truth) if truth else "" for truth in folders.values()]
    right = sum(guess == truth for truth in folders.values())
    line = f"{right} of 3 right; 1 of 4 images have no folder with the name of a class"
    assert f"{line}: {tmp_path / 'p.csv'}" in errors
    assert said(capsys, f"--from={place / 'run'}", *paths, f"--out={tmp_path / 's.html'}")[0] == 0
    page = (tmp_path / "s.html").read_text()
    assert f"<p>{line}</p>" in page
    truths = [re.search(r'data-truth="([^"]*)"', tile) for tile in page.split("<article")[1:]]
    assert [html.unescape(found[1]) if found else "" for found in truths] == list(folders.values())


def test_folder_of_two_classes_with_one_name_is_no_truth(tmp_path):
    table = registry.OUTPUTS[".csv"](tmp_path / "p.csv")
    files = ["bird/crane/1.jpg", "bird/owl/1.jpg", "bird/2.jpg"]
    table.begin(types.SimpleNamespace(class_names=("crane", "bird", "crane", "owl")), str(tmp_path), files, 1)
    for file in files:
        table.add(predict.Prediction(file, "bird", 0.5, top=[("bird", 0.5)], labels=[1]), SQUARE)
    assert table.write() == "1 of 2 right; 1 of 3 images have no folder with the name of a class"
    assert [row["true_class"] for row in rows_of(tmp_path / "p.csv")] == ["", "owl", "bird"]


def test_run_without_a_recorded_input_keeps_the_image_size(place, tmp_path):
    shutil.copytree(place / "run", tmp_path / "run")
    recorded = json.loads((tmp_path / "run" / "data.json").read_text())
    del recorded["input"]
    (tmp_path / "run" / "data.json").write_text(json.dumps(recorded))
    found = chosen(tmp_path / "run")
    assert found.spec.shape == (24, 24, 3)  # and not the 32 of other CIFAR networks
    assert any("does not say what its input is; taking --image_size=24" in note for note in found.notes)


def test_official_pixels_are_predicted_and_drawn(place, tmp_path, capsys):
    given = ["--preprocessing=official", "--precision=fp32"]
    picture, out = find_images(str(place / "images" / "val"))[0], tmp_path / "sheet.html"
    status, lines, _ = said(capsys, f"--from={place / 'run'}", *given, picture, "--json", f"--out={out}")
    ours = chosen(place / "run", *given)
    (square,) = data.center_crops([picture], ours.spec, threads=1)
    assert status == 0 and square.dtype == np.float32 and ours.spec.std == (1.0,) * 3
    assert square.shape == ours.spec.shape == (24, 24, 3)  # the size stays that of the run
    expected = np.asarray(ours.probabilities(ours.variables, square[None]))[0]
    for guess in json.loads(lines[0])["top"]:
        assert guess["probability"] == pytest.approx(expected[guess["index"]], abs=1e-6)
    np.testing.assert_array_equal(pictures(out)[1], np.rint(square).astype(np.uint8))


def test_arrays_and_files_have_the_same_predictions(place, tmp_path, capsys):
    rng = np.random.default_rng(0)
    run, pixels = mixedres.load(place / "run"), [rng.integers(0, 256, (50, 70, 3), np.uint8) for _ in range(3)]
    for index, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / f"{index}.png")
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    files = run.predict(tmp_path, top=3)
    arrays = run.predict(pixels, top=3)
    assert [one.top for one in files[:3]] == [one.top for one in arrays] and len(run._prepared) <= 2
    assert files[3].error and not files[3].top and run.predict([]) == []
    assert "give uint8" in run.predict(np.zeros((9, 9, 2), np.float32))[0].error
    assert run_command("predict", f"--from={place / 'run'}", str(tmp_path / "0.png"), "--json") == 0
    shown = json.loads(capsys.readouterr().out)["top"]
    assert [(one["class"], one["probability"]) for one in shown][:3] == files[0].top
    with pytest.raises(ConfigError, match=r"class names for a network of"):
        mixedres.load(place / "run", class_names=["one"])


def test_named_checkpoint_is_evaluated_by_the_command(place, capsys):
    """The page of errors is the named checkpoint's."""
    steps = checkpoints.RecordedRun(place / "run").steps()
    command = ["mixedres", "--mode=eval", f"--config.data.dir={place / 'images'}"]
    assert main.main([*command, f"--workdir={place / 'run'}@{steps[0]}"]) == 0
    assert f"weights of {place / 'run'}@{steps[0]}: test top-1" in capsys.readouterr().out


def test_weights_are_evaluated_without_a_run(place, tmp_path):
    config = run_cases.on_images(place, "fp16")
    of_run = run_cases.evaluate(config, place / "run")
    config.init_from = str(place / "run")
    assert run_cases.evaluate(config, tmp_path / "none") == of_run and not (tmp_path / "none").exists()
