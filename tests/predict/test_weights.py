"""Predictions of a file of weights, which tells less than a run does."""

import json

import jax
import numpy as np
import pytest
import safetensors

from mixedres import checkpoints
from mixedres.data import InputSpec
from tests import run_command
from tests.data import made
from tests.predict import said
from tests.train import run_cases


@pytest.fixture(scope="module")
def weights(place, tmp_path_factory):
    """A file of a cifar_resnet8 with the metadata of the run's export."""
    path = tmp_path_factory.mktemp("weights") / "weights.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        run_cases.shrink(patch)  # as the run was
        assert run_command("export", f"--from={place / 'run'}", f"--to={path}") == 0
    with safetensors.safe_open(path, "numpy") as exported:
        about = json.loads(exported.metadata()["mixedres"])
    variables = jax.tree.map(
        lambda x: (x - 0.5) / 4 if x.ndim > 1 else x, run_cases.random_variables(classes=3, version="1")
    )
    checkpoints.write_weights(path, checkpoints.to_tensors(variables, "torchvision"), about)
    return path


def changed(path, weights, **head):
    """Writes the weights with other numbers in the head; returns the option --from."""
    file = checkpoints.read_weights(weights)
    tensors = {name: np.full_like(file.tensors[name], value) for name, value in head.items()}
    checkpoints.write_weights(path, file.tensors | tensors, file.metadata)
    return f"--from={path}"


def test_weights_without_metadata_note_the_assumptions(place, weights, tmp_path, capsys):
    picture, bare = place / "images" / "val" / made.CLASSES[0], tmp_path / "bare.safetensors"
    of_run, file = checkpoints.RecordedRun(place / "run").data(), checkpoints.read_weights(weights)
    assert list(file.class_names) == of_run["class_names"]
    assert InputSpec.from_json(file.input) == InputSpec.from_json(of_run["input"])
    _, known, _ = said(capsys, f"--from={weights}", picture, "--json")
    checkpoints.write_weights(bare, file.tensors)
    (tmp_path / "names.txt").write_text("\n".join(f"class {name}" for name in made.CLASSES))
    status, lines, errors = said(capsys, f"--from={bare}", picture, "--json", f"--labels={tmp_path / 'names.txt'}")
    assert status == 0 and "taking --image_size=32" in errors and errors.startswith("note: ")
    assert json.loads(lines[0])["top"][0]["class"].startswith("class ")
    _, lines, errors = said(capsys, f"--from={bare}", picture, "--json", "--image_size=24", "--preprocessing=torch")
    shares = [[guess["probability"] for guess in json.loads(line)["top"]] for line in (lines[0], known[0])]
    assert errors == "" and shares[0] == shares[1] and 0.01 < shares[0][1] < shares[0][0]


def test_non_finite_output_is_an_error(place, weights, tmp_path, capsys):
    bad, out = changed(tmp_path / "bad.safetensors", weights, **{"fc.weight": 3e38}), tmp_path / "sheet.html"
    picture = place / "images" / "val" / made.CLASSES[0]
    status, lines, errors = said(capsys, bad, picture, "--json", f"--out={out}")
    assert status == 2 and len(lines) == 7 and not out.exists()
    assert "output is not finite in fp32" in json.loads(lines[0])["error"] and "none of the 7 files" in errors


def test_equal_probabilities_are_in_the_order_of_the_classes(place, weights, tmp_path, capsys):
    equal = changed(tmp_path / "equal.safetensors", weights, **{"fc.weight": 0, "fc.bias": [-1, 2, 2]})
    status, lines, _ = said(capsys, equal, place / "images" / "val" / made.CLASSES[0], "--json", "--topk=3")
    assert status == 0
    assert all([guess["index"] for guess in json.loads(line)["top"]] == [1, 2, 0] for line in lines)
