"""The pages: names as they are, room for a bounded number of images, confusions and worst errors."""

import dataclasses
import html
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from sklearn import metrics

from mixedres import data, photographs
from mixedres.photographs import gallery

SQUARE = np.zeros((2, 2, 1), np.uint8)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("x" * 300_000, None),
        ("\ud800\udfff", r"\ud800\udfff"),
        ("two\nlines\0", "two\nlines\\x00"),
        ("\x1b[31m\u202egnp.exe\x07", r"\x1b[31m\u202egnp.exe\x07"),
        ("café 猫 <b onload='x'>&amp;\"{{script}}</script>", None),
    ],
)
def test_names_are_shown_as_they_are(name, expected, tmp_path):
    page, sheet = photographs.Gallery(), tmp_path / "sheet.html"
    page.add(photographs.Tile(name, SQUARE, [(name, 0.5), ("b", 0.25)], truth=1, loss=1.4))
    page.write(sheet, name, [page.summary()])
    text = sheet.read_text(encoding="utf-8")
    shown = html.unescape(re.search("<h3>(.*?)</h3>", text, re.DOTALL)[1])
    assert shown == (expected or name) and not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert text.count("<script>") == 1 and text.count("</script>") == 1 and "<b onload" not in text
    # It asks for nothing outside.
    assert "default-src 'none'; img-src data:" in text and not re.search(r"https?:|url\(|@import|<link", text)
    assert "0 of 1 right" in text and 'data-confidence="0.5"' in text and 'style="--p:25.00%"' in text


def test_full_page_counts_the_images_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(gallery, "MOST_TILES", 2)
    page = photographs.Gallery()
    for truth in (0, 0, 1, None):
        page.add(photographs.Tile("x.jpg", SQUARE, [("a", 1.0), ("b", 0.0)], truth=truth))
    assert page.summary() == (
        "2 of 3 right; 1 of 4 images have no folder with the name of a class; the page shows the first 2 of 4 images"
    )
    monkeypatch.setattr(gallery, "MOST_BYTES", 100)
    small = photographs.Gallery()
    for _ in range(3):
        small.add(photographs.Tile("x.jpg", SQUARE, [("a", 1.0)]))
    assert small.summary() == "3 images; the page shows the first 1 of 3 images"


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs Debian's package chromium")
def test_card_on_a_telephone_shows_what_was_predicted(tmp_path):
    """Shows it of right, wrong and unknown images before a tap; hides other classes and the words under pictures."""
    page, sheet = photographs.Gallery(), tmp_path / "sheet.html"
    for truth in (0, 1, None):
        page.add(photographs.Tile("x.jpg", SQUARE, [("cat", 0.75), ("dog", 0.25)], truth=truth))
    page.write(sheet, "sheet", [page.summary()])
    seen = "document.title = JSON.stringify([...document.querySelectorAll('article')].map(a => a.innerText))"
    laid_out = "<style>article { content-visibility: visible !important }</style>"  # before the page is painted
    sheet.write_text(sheet.read_text().replace("</body>", f"{laid_out}<script>{seen}</script></body>"))
    command = ["chromium", "--headless", "--no-sandbox", "--window-size=600,900", "--dump-dom", sheet.as_uri()]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    cards = json.loads(html.unescape(re.search("<title>(.*?)</title>", printed)[1]))
    for card, verdict in zip(cards, ("right: it is cat", "wrong: it is dog, not cat", ""), strict=True):
        assert card.split() == f"x.jpg {verdict} cat 75.0%".split()


def results(labels, predicted, losses, batch=4):
    """Results collected in batches, of images that hold their own number; every third row is padding."""
    collector = data.ResultCollector()
    for start in range(0, len(labels), batch):
        padded = np.repeat(np.arange(start, min(start + batch, len(labels))), 2)
        mask = np.arange(len(padded)) % 2 == 0
        found = {
            "label": labels[padded],
            "predicted": predicted[padded],
            "loss": losses[padded],
            "top": np.stack([predicted[padded], labels[padded]], 1),
            "probability": np.full((len(padded), 2), [0.75, 0.25], np.float32),
        }
        pixels = np.broadcast_to(padded[:, None, None, None], (len(padded), 2, 2, 1)).astype(np.uint8)
        collector.add(2 * start, mask, found, lambda pixels=pixels: pixels)
    return collector.results()


def made(count, classes, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, count).astype(np.int32)
    predicted = np.where(rng.random(count) < 0.6, labels, rng.integers(0, classes, count)).astype(np.int32)
    return labels, predicted, rng.permutation(count).astype(np.float32) / 16


def test_worst_errors_are_kept_largest_loss_first(monkeypatch):
    monkeypatch.setattr("mixedres.data.results.MOST_ERRORS", 5)
    labels, predicted, losses = made(60, 4)
    losses[17], predicted[17] = np.nan, (labels[17] + 1) % 4
    found = results(labels, predicted, losses)
    np.testing.assert_array_equal(found.label, labels)
    np.testing.assert_array_equal(found.index, 2 * np.arange(60))  # padding has numbers too
    wrong = [row for row in np.argsort(-np.nan_to_num(losses, nan=np.inf)) if labels[row] != predicted[row]]
    assert list(found.images) == wrong[:5]
    assert all((image == place).all() for place, image in found.images.items())


def source(classes, names=()):
    counts = {"num_classes": classes, "train_examples": 1, "eval_examples": 60}
    return data.DataInfo(image_shape=(2, 2, 1), class_names=names, **counts)


def test_errors_page_has_matrix_classes_and_worst_errors(tmp_path):
    labels, predicted, losses = made(60, 4)
    found = results(labels, predicted, losses)
    words = photographs.write_errors(tmp_path / "errors.html", found, source(4, ("a", "b", "<c>", "d")), "my run")
    text = (tmp_path / "errors.html").read_text()
    assert words == f"errors: {tmp_path / 'errors.html'}"
    expected = metrics.confusion_matrix(labels, predicted, labels=range(4))
    cells = re.findall(r"<td(?: class=\"miss\")? style=\"--f:([0-9.]+)\" title=\"[^\"]*\">(\d*)</td>", text)
    np.testing.assert_array_equal(np.reshape([int(count or 0) for _, count in cells], (4, 4)), expected)
    shares = np.reshape([float(share) for share, _ in cells], (4, 4))
    np.testing.assert_allclose(shares, expected / expected.sum(1, keepdims=True), atol=5e-4)
    right, wrong = (labels == predicted).sum(), (labels != predicted).sum()
    assert f"top-1 {right / 60:.2%} ({right} of 60 test images right), loss {losses.mean():.4f}" in text
    assert f"<p>The page shows all {wrong} errors, the largest loss first.</p>" in text and "order as read" not in text
    assert text.count("<article") == wrong and "image 0<" not in text and "&lt;c&gt;" in text and "<c>" not in text


@pytest.mark.parametrize("answer", [0, None])
def test_errors_page_of_one_answer_and_of_none_wrong(answer, tmp_path):
    labels = np.int32([0, 1, 1, 1])
    predicted = labels if answer is None else np.full(4, answer, np.int32)
    photographs.write_errors(tmp_path / "errors.html", results(labels, predicted, np.ones(4)), source(2), "my run")
    text = (tmp_path / "errors.html").read_text()
    assert ("<p>4 of 4 are predicted as 0, at least twice as many as there are</p>" in text) == (answer == 0)
    assert ("There are no errors." in text) == (answer is None) == ("Worst errors" not in text)


@pytest.mark.parametrize("classes", [4, 40])
def test_scores_of_classes_are_scikit_learns(tmp_path, classes):
    """Some of 40 classes have no images, or no predictions."""
    labels, predicted, losses = made(60, classes)
    scores = data.class_scores(results(labels, predicted, losses))
    present = sorted({*labels, *predicted})
    assert {label: score.images for label, score in scores.items()} == {k: (labels == k).sum() for k in present}
    precision, recall, f1, _ = metrics.precision_recall_fscore_support(labels, predicted, zero_division=0)
    np.testing.assert_allclose([score[1:] for score in scores.values()], np.transpose([recall, precision, f1]))
    macro = metrics.f1_score(labels, predicted, average="macro")
    assert data.macro_f1(scores) == pytest.approx(macro)
    photographs.write_errors(tmp_path / "errors.html", results(labels, predicted, losses), source(classes), "t")
    text, first = (tmp_path / "errors.html").read_text(), min(scores, key=lambda label: scores[label].recall)
    cells = (scores[first].images, *(f"{x:.1%}" for x in scores[first][1:3]))
    row = "".join(f'<td class="n">{cell}</td>' for cell in cells)
    assert f"macro F1 {macro:.2%}" in text and f"<tbody><tr><td>{first}</td>{row}" in text


def test_classes_of_one_name_are_told_apart(tmp_path):
    """As 'crane' and 'maillot' of ImageNet; blanks do not show on a page."""
    found = results(np.int32([0, 1, 2, 3]), np.int32([1, 0, 2, 3]), np.ones(4, np.float32))
    photographs.write_errors(tmp_path / "errors.html", found, source(4, ("crane", "crane", "owl", "owl ")), "t")
    text = (tmp_path / "errors.html").read_text()
    assert re.findall(r'<article class="(\w+)"', text) == ["wrong", "wrong"]
    assert re.findall("it is (.*?), not ", text) == ["crane (class 0)", "crane (class 1)"]
    assert '<th title="owl (class 2)">' in text and '<th title="owl  (class 3)">' in text
    tile = photographs.Tile("x.jpg", SQUARE, [("crane", 0.9), ("crane", 0.1)])
    assert [dataclasses.replace(tile, truth=place).verdict for place in (0, 1, None)] == ["right", "wrong", ""]


def test_pairs_replace_the_matrix_of_many_classes(tmp_path):
    labels, predicted, losses = made(3000, 40)
    labels[:99], predicted[:99] = 7, 8
    found = results(labels, predicted, losses, batch=500)
    assert photographs.write_errors(tmp_path / "errors.html", found, source(40), "my run")
    text = (tmp_path / "errors.html").read_text()
    count, total = ((labels == 7) & (predicted == 8)).sum(), (labels == 7).sum()
    first = f'<td>7</td><td>8</td><td class="n">{count}</td><td class="n">{count / total:.1%}</td>'
    wrong = (labels != predicted).sum()
    assert f"<p>The page shows the 200 errors with the largest losses, of {wrong:,}.</p>" in text
    assert first in text and text.count("<article") == data.results.MOST_ERRORS and "Confusion matrix" not in text


def test_page_that_cannot_be_written_is_no_error(tmp_path):
    found = results(*made(8, 2))
    assert photographs.write_errors(tmp_path / "none" / "errors.html", found, source(2), "t") == ""
    (tmp_path / "errors.html").mkdir()
    words = photographs.write_errors(tmp_path / "errors.html", found, source(2), "t")
    assert words == f"{tmp_path / 'errors.html'} could not be written (Is a directory)"


def test_true_class_outside_the_shown_classes_has_its_probability(tmp_path):
    found = results(*made(1, 8, seed=2))
    label = int(found.label[0])
    top = np.array([[other for other in range(8) if other != label][:5]])
    shown = {"probability": np.float32([[0.4, 0.2, 0.1, 0.1, 0.1]]), "loss": np.float32([3.0]), "images": {0: SQUARE}}
    found = dataclasses.replace(found, predicted=top[:, 0], top=top, **shown)
    photographs.write_errors(tmp_path / "errors.html", found, source(8), "t")
    bars = re.findall(r'<li style="--p:([0-9.]+)%" title="(.)">', (tmp_path / "errors.html").read_text())
    assert len(bars) == 6 and bars[-1] == (f"{100 * np.exp(-3):.2f}", str(label))
    assert "<p>The page shows the only error.</p>" in (tmp_path / "errors.html").read_text()
