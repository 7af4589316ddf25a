"""What the documents show runs, and the numbers they quote are those in the files."""

import json
import pathlib
import re

import numpy as np
import pytest

from experiments import digits_accuracy
from mixedres import precision
from mixedres.config_keys import KEYS

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
README = PAGES[0].read_text()


def python_blocks(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


def test_the_example_of_the_readme_trains_in_float16(capsys):
    (example,) = python_blocks(ROOT / "README.md")
    assert len(example.splitlines()) <= 40
    names = {}
    exec(example, names)
    assert names["loss"] < 0.1 and names["loss"].dtype == np.float32
    assert capsys.readouterr().out.startswith("loss 0.0")
    jaxpr = str(names["jax"].make_jaxpr(names["step"])(names["params"], names["state"]))
    assert "preferred_element_type=float16" in jaxpr and "preferred_element_type=float32" not in jaxpr


def test_the_config_of_the_docs_is_a_config():
    (example,) = python_blocks(ROOT / "docs" / "training.md")
    names = {}
    exec(example, names)
    assert names["get_config"]("fp16,epochs=3").epochs == 3.0


def test_the_table_of_results_is_made_from_the_file():
    results = json.loads((ROOT / "experiments" / "results" / "digits_accuracy.json").read_text())
    assert "\n".join(digits_accuracy.table(results["rows"])) in README


def test_the_cost_of_loss_scaling_is_that_in_the_file():
    results = json.loads((ROOT / "experiments" / "results" / "loss_scale_overhead.json").read_text())
    rows = {row["to"]: row for row in results["rows"] if row["step"] == "dynamic"}
    text = " ".join(README.split())
    for to, place in (("unchecked", " (95 % interval {:.3f} to {:.3f})"), ("none", " ({:.3f} to {:.3f})")):
        assert f"{rows[to]['ratio']:.3f}" + place.format(*rows[to]["interval"]) in text
    assert f"{results['rounds']} rounds" in text


def test_the_table_of_presets_is_complete():
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([^|]*) \|", README, re.MULTILINE)
    shown = {name: (dtype, scale) for name, dtype, scale in rows if name in precision.PRESETS}
    assert set(shown) >= set(precision.PRESETS)
    for name in precision.PRESETS:
        preset = precision.get(name)
        dtype, scale = shown[name]
        assert dtype == np.dtype(preset.policy.compute_dtype).name
        expected = f"{preset.loss_scale:g}" if isinstance(preset.loss_scale, float) else preset.loss_scale
        assert scale.strip().startswith(expected)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_and_keys_exist(path):
    text = path.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (path.parent / target).exists(), target
    for key in re.findall(r"--config\.([\w.]+)=", text):
        assert key in {k.path for k in KEYS} or key == "KEY", key
    for file in re.findall(r"configs/\w+\.py", text):
        assert (ROOT / file).exists(), file
