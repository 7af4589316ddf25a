"""The page of an evaluation: confusions, recall and precision of each class, and the worst errors."""

import collections
import os
import pathlib
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from mixedres._internal.errors import reason
from mixedres._internal.pages import escaped
from mixedres.data import ClassScores, ImageResults, Source, class_scores, macro_f1
from mixedres.photographs.gallery import Gallery, Tile, short_name

# Classes of a confusion matrix, and pairs of classes that take its place if there are more.
MOST_IN_MATRIX, _MOST_PAIRS = 30, 50


def write_errors(path: pathlib.Path, results: ImageResults, source: Source, title: str) -> str:
    """Writes the page of an evaluation and returns words for the console, such as 'errors: runs/a/errors.html'.

        train.evaluate(plan, on_results=lambda experiment, results: photographs.write_errors(
            directory / "errors.html", results, experiment.source, "my run"))

    Returns '' if the directory of the page does not exist, and the reason if the page cannot be written.
    """
    if not path.parent.is_dir():
        return ""
    names = _distinct((*source.class_names, *map(str, range(len(source.class_names), source.num_classes))))
    gallery = Gallery()
    for place, image in results.images.items():
        gallery.add(_tile(results, place, image, names, source))
    wrong = int((results.predicted != results.label).sum())
    total = len(results.label)
    loss, scores = results.loss.mean(dtype=float), class_scores(results)
    answer, answers = collections.Counter(results.predicted.tolist()).most_common(1)[0]
    lines = [
        f"top-1 {1 - wrong / total:.2%} ({total - wrong:,} of {total:,} test images right), loss {loss:.4f}, "
        f"macro F1 {macro_f1(scores):.2%}",
        _described(wrong, len(results.images)),
    ]
    if answers >= 2 * int((results.label == answer).sum()):
        lines.append(f"{answers:,} of {total:,} are predicted as {names[answer]}, at least twice as many as there are")
    # {(class, predicted class): number of images}
    counts = collections.Counter(zip(results.label.tolist(), results.predicted.tolist(), strict=True))
    shown = matrix if len(names) <= MOST_IN_MATRIX else pairs
    before = f"{shown(counts, names)}{class_table(counts, scores, names)}{'<h2>Worst errors</h2>' * bool(wrong)}"
    try:
        gallery.write(path, title, lines, before, of_errors=True)
    except OSError as error:
        return f"{path} could not be written ({reason(error)})"
    return f"errors: {path}"


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of classes, with the number of the class where two names look alike on a page."""
    looks = [" ".join(unicodedata.normalize("NFC", name).split()) for name in names]
    counts = collections.Counter(looks)
    return tuple(
        f"{name} (class {label})" if counts[look] > 1 else name
        for label, (name, look) in enumerate(zip(names, looks, strict=True))
    )


def _described(wrong: int, shown: int) -> str:
    """Returns which of the errors the page shows."""
    if not wrong:
        return "There are no errors."
    if shown < wrong:
        return f"The page shows the {shown:,} errors with the largest losses, of {wrong:,}."
    if wrong == 1:
        return "The page shows the only error."
    return f"The page shows all {wrong:,} errors, the largest loss first."


def matrix(counts: dict[tuple[int, int], int], names: Sequence[str]) -> str:
    """Returns the confusion matrix as HTML: a row for each class, a column for each predicted class."""
    sums = _sums(counts)
    head = "".join(f"<th>{escaped(name)}</th>" for name in names)
    rows = []
    for label, name in enumerate(names):
        cells = []
        for predicted, other in enumerate(names):
            count = counts.get((label, predicted), 0)
            miss = ' class="miss"' if count and label != predicted else ""
            share = count / max(1, sums[label])
            words = escaped(f"{count} of {sums[label]} images of {name} are predicted as {other}")
            cells.append(f'<td{miss} style="--f:{share:.3f}" title="{words}">{count or ""}</td>')
        rows.append(f'<tr><th title="{escaped(name)}">{escaped(name)}</th>{"".join(cells)}</tr>')
    table = f'<table class="matrix"><thead><tr><td></td>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    words = '<h2>Confusion matrix</h2><p class="soft">A row is a class, a column a predicted class.</p>'
    return words + _scrolling(table)


def pairs(counts: dict[tuple[int, int], int], names: Sequence[str]) -> str:
    """Returns the pairs of classes that are confused most often as an HTML table."""
    sums = _sums(counts)
    wrong = sorted(((n, pair) for pair, n in counts.items() if pair[0] != pair[1]), key=lambda x: (-x[0], x[1]))
    rows = [
        (names[label], names[predicted], f"{n:,}", f"{n / sums[label]:.1%}")
        for n, (label, predicted) in wrong[:_MOST_PAIRS]
    ]
    table = _table(("class", "predicted as", "images", "of the class"), rows, (2, 3))
    return f"<h2>Most confused classes</h2>{table}"


def class_table(counts: dict[tuple[int, int], int], scores: Mapping[int, ClassScores], names: Sequence[str]) -> str:
    """Returns recall and precision of each class as an HTML table, the lowest recall first."""
    wrong: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
    for (label, predicted), n in counts.items():
        if label != predicted:
            wrong[label].append((-n, predicted))

    def rows() -> Iterator[tuple[str, ...]]:
        for label, score in sorted(scores.items(), key=lambda item: (item[1].recall, item[0])):
            most, other = min(wrong[label], default=(0, 0))
            confused = f"{names[other]} ({-most:,})" if most else ""
            yield names[label], f"{score.images:,}", f"{score.recall:.1%}", f"{score.precision:.1%}", confused

    table = _table(("class", "images", "recall", "precision", "most confused with"), rows(), (1, 2, 3))
    return f"<details{' open' if len(scores) <= MOST_IN_MATRIX else ''}><summary>Classes</summary>{table}</details>"


def _sums(counts: dict[tuple[int, int], int]) -> dict[int, int]:
    """Returns {class: number of its images}."""
    sums: dict[int, int] = collections.defaultdict(int)
    for (label, _), n in counts.items():
        sums[label] += n
    return sums


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int]) -> str:
    """Returns an HTML table of texts; the columns `numbers` are aligned at the right."""
    classes = [' class="n"' if column in numbers else "" for column in range(len(head))]

    def line(row: Sequence[str]) -> str:
        return "".join(f"<td{kind}>{escaped(text)}</td>" for kind, text in zip(classes, row, strict=True))

    columns = "".join(f"<th>{name}</th>" for name in head)
    body = "".join(f"<tr>{line(row)}</tr>" for row in rows)
    return _scrolling(f"<table><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table>")


def _scrolling(table: str) -> str:
    """Returns a table in a box that scrolls, with the keyboard too."""
    return f'<div class="scroll" tabindex="0">{table}</div>'


def _tile(results: ImageResults, place: int, image: np.ndarray, names: Sequence[str], source: Source) -> Tile:
    index = int(results.index[place])
    file = getattr(source, "eval_file_name", lambda index: "")(index)  # sources without files need not have it
    labels, label = results.top[place].tolist(), int(results.label[place])
    top = [(names[i], float(p)) for i, p in zip(labels, results.probability[place], strict=True)]
    if label not in labels:  # the loss is the negative logarithm of the probability
        labels.append(label)
        top.append((names[label], float(np.exp(-results.loss[place]))))
    return Tile(
        name=short_name(file, names[label]) if file else f"image {index}",
        square=image,
        top=top,
        truth=labels.index(label),
        loss=float(results.loss[place]),
        photograph=file if os.path.isfile(file) else None,
    )
