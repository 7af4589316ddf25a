"""The page of the numerics report: alone in the world, safe for any name, with the numbers of the report."""

import copy
import dataclasses
import functools
import html.parser
import json
import pathlib
import re
import shutil
import subprocess
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixedres import numerics
from mixedres._internal.cli import console
from mixedres.numerics._report import Probe
from mixedres.numerics._rows import LEVELS
from mixedres.numerics._text import USUAL_ERRORS
from mixedres.numerics._text import page as render

FOLDER = pathlib.Path(numerics.__file__).parent / "_page"
HOSTILE = (
    '</script><script>alert(1)</script><!-- <img onerror=x> & {{script}} {{data}} \u2028\u2029 \ud800 "quoted" \'é'
)


@functools.cache
def written():
    """The document of a report of two layers with everything that a page shows."""

    def loss(params, x):
        return numerics.tap(jnp.tanh(numerics.tap(x @ params["first"], "first")) @ params["second"], "second").sum()

    params = {name: np.eye(4, dtype=np.float32) for name in ("first", "second")}
    report = numerics.examine(loss, params, np.ones((2, 4), np.float32), title="a network").at_step(3)
    comparison = numerics.Trial(17, 0.005, 0.01, "second", 0.003, preset="fp16")
    document = dataclasses.replace(report, comparisons=(comparison,), notes=("a note",)).to_json()
    rows = [{key: value for key, value in row.items() if key != "parts"} for row in document["rows"]]
    return document | {"rows": rows}


def hostile(document):
    """A document with another text in place of all of its texts."""
    return jax.tree.map(lambda value: HOSTILE if isinstance(value, str) else value, document)


class Elements(html.parser.HTMLParser):
    """The elements of a page and their texts, as a browser splits them."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.texts, self.key = [], [], {}, ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.key = dict(attrs).get("id", tag)

    def handle_endtag(self, tag):
        self.key = ""

    def handle_data(self, data):
        self.texts[self.key] = self.texts.get(self.key, "") + data


def test_page_loads_nothing_from_elsewhere():
    page = render(written())
    assert not re.search(r"https?:|\bsrc\s*=|\bhref\s*=|@import|url\(|fetch\(|XMLHttp|WebSocket|import\s*\(", page)
    elements = Elements(page)
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & set(elements.tags)
    # Nor would the browser let it.
    policy = next(value for name, value in elements.attributes if name == "content" and "default-src" in value)
    assert policy.startswith("default-src 'none'") and "http" not in policy


def test_names_become_no_elements():
    plain, page = Elements(render(written() | {"advice": "without a power"})), render(hostile(written()))
    elements = Elements(page)
    assert elements.tags == plain.tags and elements.attributes == plain.attributes
    assert elements.texts["title"].strip() == console.printable(HOSTILE)
    assert elements.texts["script"] == plain.texts["script"]
    assert not set("<>&\u2028\u2029") & set(page.partition('id="data">')[2].partition("</script>")[0])
    page.encode("utf-8")


@pytest.mark.parametrize("make", [dict, hostile])
def test_document_comes_back(make):
    given = make(written())
    before = copy.deepcopy(given)
    read = json.loads(Elements(render(given)).texts["data"])
    assert read.pop("usual_errors") == USUAL_ERRORS and read == given == before


def test_non_finite_numbers_become_null():
    bad = {"preset": "fp16", "log2_scale": 40, "worst": float("inf"), "worst_name": "head", "median": float("nan")}
    read = json.loads(Elements(render(written() | {"comparison": [bad]})).texts["data"])
    assert read["comparison"] == [bad | {"worst": None, "median": None}]


def test_script_reads_the_keys_of_the_report():
    script = (FOLDER / "page.js").read_text()
    shown = re.search(r"\.\.\.(\[[^\]]*\])\.map\(key =>", script)
    limits = {f"{key}_log2_scale" for key in json.loads(shown[1])}
    assert {field.name for field in dataclasses.fields(Probe)} == limits | {"step"}
    for field in ("preset", "log2_scale", "worst", "worst_name", "median"):
        assert f"c.{field}" in script and field in written()["comparison"][0]


def evaluate(expression, **given):
    """The value of a JavaScript expression that sees the functions of page.js and `given`."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node on the PATH")
    code = (
        "const given = JSON.parse(require('fs').readFileSync(0, 'utf8'));"
        f"const page = require({json.dumps(str(FOLDER / 'page.js'))});"
        f"process.stdout.write(JSON.stringify({expression}));"
    )
    done = subprocess.run([node, "-e", code], input=json.dumps(given), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["transformer", "tiny factors, huge logits"])
def test_page_shows_the_verdicts_of_the_report(name):
    cases = pytest.importorskip("tests.numerics.cases")
    report = dataclasses.replace(cases.examined(name)[1], log2_scale=50)
    document = report.to_json()
    scales = range(-24, 51)
    code = "given.scales.map(s => given.document.rows.map(row => page.effectOf(row, s, given.document)))"
    counts = evaluate("page.countVerdicts(given.document.rows, 0, given.document)", document=document)
    assert counts == dict.fromkeys(LEVELS, 0) | Counter(report.verdict(row, 0) for row in report.rows)
    for scale, effects in zip(scales, evaluate(code, document=document, scales=[*scales]), strict=True):
        assert [effect["verdict"] for effect in effects] == [report.verdict(row, scale) for row in report.rows]
        lost = [row.lost(scale) for row in report.rows]
        np.testing.assert_allclose([effect["lost"] for effect in effects], lost, rtol=0, atol=1e-5)


def test_axis_holds_every_window_and_folds_what_is_behind_a_gap():
    near, far = {"first": -55, "counts": [1, 0, 0]}, {"first": -90, "counts": [3, 4]}
    rows = [{"first": -40, "counts": [0, 5, 1]}, near, far, {"first": 0, "counts": []}, {"first": 30, "counts": [2]}]
    axis, cells = evaluate(
        "(axis => [axis, given.rows.map(row => page.cellsOf(row, axis))])"
        "(page.axisOf(given.rows, [0, 17], given.rules))",
        rows=rows,
        rules=written()["rules"],
    )
    window = evaluate("page.windowAt(17, given.rules)", rules=written()["rules"])
    assert window == {"left": -42, "normal": -31, "right": -1}
    # 2**-55 is 13 octaves below the window, behind 12 empty ones. 2**-90 and 2**30 are counted in the outermost cells.
    assert axis == {"low": -44, "high": 18} and [sum(line) for line in cells] == [6, 1, 7, 0, 2]
    assert cells[0][-39 + 44] == 5 and cells[0][-38 + 44] == 1 and cells[1][0] == 1 and cells[2][0] == 7
    assert cells[4][-1] == 2
    rows[1]["counts"] = [0, 1, 0]
    assert evaluate("page.axisOf(given.rows, [0, 17], given.rules)", rows=rows, rules=written()["rules"])["low"] == -56


def test_rows_stand_side_by_side():
    left, right = ([{"name": name} for name in names] for names in (["a", "b", "b", "d"], ["a", "b", "c", "d", "e"]))
    lines = evaluate("page.align([given.left, given.right])", left=left, right=right)
    assert [line["name"] for line in lines] == ["a", "b", "c", "b", "d", "e"]
    present = ["".join("x" if row else "-" for row in line["rows"]) for line in lines]
    assert present == ["xx", "xx", "-x", "x-", "xx", "-x"]
