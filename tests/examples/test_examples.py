"""The examples train in half precision as they say, and the notebook runs."""

import functools
import importlib.util
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mixedres._internal.jax_compat import equations
from mixedres.amp import autocast
from mixedres.precision import DynamicLossScale, StaticLossScale
from tests import ROOT

FOLDER = ROOT / "examples"
FILES = sorted(FOLDER.glob("*.py"))
NOTEBOOK, OF_PAGE = FOLDER / "mixed_precision.ipynb", FOLDER / "your_own_program.ipynb"


def test_all_examples_are_listed():
    page = (ROOT / "docs" / "examples.md").read_text()
    assert sorted(re.findall(r"`examples/([\w.]+)`", page)) == sorted(path.name for path in (*FILES, NOTEBOOK, OF_PAGE))


def test_notebook_is_stored_with_its_results():
    """The site shows the stored results; test_notebook runs the code."""
    code = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"stream", "execute_result", "display_data"}
    (table,) = ("".join(o["data"]["text/markdown"]) for o in outputs if "text/markdown" in o.get("data", {}))
    assert all(float(accuracy) >= 95 for accuracy in re.findall(r"([\d.]+)%", table))


def test_notebook_of_a_page_has_its_blocks_and_prints_what_it_says():
    """docs/live.py writes it. A slow test runs the page."""
    page = (ROOT / "docs" / "library.md").read_text()
    code = [cell for cell in json.loads(OF_PAGE.read_text())["cells"] if cell["cell_type"] == "code"]
    assert ["".join(cell["source"]) for cell in code] == [
        block.strip() for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    ]
    printed = "".join("".join(output["text"]) for cell in code for output in cell["outputs"])
    for block in re.findall(r"```text\n(.*?)```", page, re.DOTALL):
        assert all(part in printed for line in block.splitlines() for part in line.split("..."))


@pytest.fixture
def example(monkeypatch):
    """Imports an example. `calls` of the module are the results of its functions that train, in order."""

    def load(name):
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.calls = []
        for function in {"train", "fit"} & vars(module).keys():
            monkeypatch.setattr(module, function, recorded(getattr(module, function), module.calls))
        return module

    with jax.numpy_rank_promotion("allow"):  # as users run them
        yield load


def recorded(function, results):
    @functools.wraps(function)
    def call(*args):
        call.arguments = args
        results.append(function(*args))
        return results[-1]

    return call


def check(results, products, accuracy=0.95):
    """Accuracies, and that all products of the loss are half."""
    assert results["float16"] >= accuracy
    assert abs(results["float16"] - results.get("float32", results["float16"])) <= 0.02
    assert results["explain"].startswith(f"{products} of {products} operations of the allow list")


def check_float32(tree):
    dtypes = {x.dtype for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)}
    assert dtypes == {jnp.dtype("float32")}


def digits():
    """A batch of images (b, 8, 8, 1), and labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return (images[:128] / 16).astype("float32").reshape(-1, 8, 8, 1), labels[:128]


@pytest.mark.slow
def test_flax_nnx(example):
    from flax import nnx

    module = example("flax_nnx")
    results = module.main()
    check(results, products=3)
    assert 5 <= results["skipped"] <= 9 and results["doctor"].startswith("Take float16 at loss scale 2**")
    model, state = module.calls[1]
    check_float32(nnx.state((model, state), nnx.filterlib.Not(nnx.RngState)))
    assert state.loss_scale.loss_scale == 2.0 ** (24 - results["skipped"])
    # Skipped steps change no statistics, only the random stream.
    model, state = module.train(autocast(module.loss), DynamicLossScale(2.0**24), *digits(), 1)
    assert not state.grads_finite and not model.norm1.mean[...].any() and model.dropout.rngs.count[...] == 1


@pytest.mark.slow
def test_flax_linen(example):
    module = example("flax_linen")
    results = module.main()
    check(results, products=2)  # the head is kept in float32
    assert results["doctor"].startswith("Take float16 at loss scale 2**")
    state = results["state"]
    check_float32(state)
    too_large = DynamicLossScale(2.0**60, max_loss_scale=2.0**60)
    skipped = module.step(state.replace(opt_state=state.opt_state._replace(loss_scale=too_large)), *digits())
    assert skipped.opt_state.loss_scale.loss_scale == 2.0**59
    kept = [(each.params, each.batch_stats) for each in (skipped, state)]
    jax.tree.map(np.testing.assert_array_equal, *kept)
    applied = module.step(state, *digits())
    assert applied.opt_state.grads_finite
    assert (applied.batch_stats["norm0"]["mean"] != state.batch_stats["norm0"]["mean"]).all()


@pytest.mark.slow
def test_equinox(example):
    equinox = pytest.importorskip("equinox")
    module = example("equinox_mlp")
    results = module.main()
    check(results, products=3)
    assert results["skipped"] == 0 and "model/head/weight, forward: argument" in results["doctor"]
    check_float32(equinox.filter(module.calls[1], equinox.is_array))


@pytest.mark.slow
def test_haiku(example):
    pytest.importorskip("haiku")
    module = example("haiku_batch_norm")
    results = module.main()
    check(results, products=3)
    assert abs(results["bfloat16"] - results["float32"]) <= 0.02
    assert results["doctor"].startswith("Take float16 at loss scale 2**")
    check_float32(module.calls[1])


@pytest.mark.slow
def test_keras(example, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    pytest.importorskip("keras")
    module, models = example("keras_fit"), []
    monkeypatch.setattr(module, "network", recorded(module.network, models))
    check(module.main(), products=3)
    full, half = models
    variables = ([v.value for v in half.trainable_variables], [v.value for v in half.non_trainable_variables])
    check_float32(variables)
    for model, dtypes in ((full, {"float32"}), (half, {"float16"})):
        program = jax.make_jaxpr(model.stateless_call)(*variables, jnp.ones((2, 64)))
        found = [eqn for eqn in equations(program) if eqn.primitive.name == "dot_general"]
        assert found and {atom.aval.dtype.name for eqn in found for atom in eqn.invars} == dtypes

    module = example("keras_loop")
    check(module.main(), products=3)
    check_float32(module.calls[1])
    assert all(variable.dtype in ("float32", "uint32") for variable in module.model.variables)


@pytest.mark.slow
def test_transformers(example):
    pytest.importorskip("transformers", "4.57")
    module = example("transformers_gpt2")
    results = module.main()
    assert results["entropy"] < results["float16"] < results["entropy"] + 0.1
    assert abs(results["float16"] - results["float32"]) < 0.01
    assert results["explain"].startswith("13 of 13 operations of the allow list")
    check_float32(module.calls[1][0])


@pytest.mark.slow
def test_scan_and_remat(example):
    results = example("scan_and_remat").main()
    check(results, products=8)
    check_float32(results["params"])
    assert "is not finite is mlp, forward: convert_element_type, float16" in results["doctor"]
    assert "scan_and_remat.py:" in results["doctor"] and ", in iteration 2; " in results["doctor"]


@pytest.mark.slow
def test_gradient_accumulation(example):
    module = example("gradient_accumulation")
    results = module.main(steps=400)
    check(results, products=3)
    assert 5 <= results["skipped"] <= 9 and results["steps"] == (400 - results["skipped"]) // 4
    check_float32(module.calls[1])


@pytest.mark.slow
def test_lbfgs(example):
    module = example("lbfgs")
    results = module.main()
    check(results, products=2)
    assert results["float16 loss"] < 1.1 * results["float32 loss"] < 0.1 and results["skipped"] == 0
    check_float32(module.calls[1][0])
    # A loss scale alone changes nothing.
    _, scaled, _ = module.fit(module.loss, StaticLossScale(2.0**15), *module.fit.arguments[2:])
    np.testing.assert_allclose(scaled, results["float32 loss"], rtol=1e-4)


@pytest.mark.slow
def test_sharded(example):
    results = example("sharded").main()
    assert results["explain"].startswith("3 of 3 operations of the allow list")
    np.testing.assert_allclose(results[8][:20], results[1][:20], rtol=1e-2)
    assert results[8][-10:].mean() < 0.15
    check_float32((results["params"], results["state"]))
    for tree in (results["params"], results["state"].inner_state[0].mu):
        assert tree["up"].sharding.spec == P(None, "model") and len(tree["up"].devices()) == 8
    assert results["state"].loss_scale.total_skipped == 0


@pytest.mark.slow
def test_layer_scale(example):
    results = example("layer_scale").main()
    assert "2**6, with gamma0, gamma1 and gamma2 in float32" in results["doctor"]
    assert results["advised"] < 0.002 < results["bfloat16"] < 0.02 < 0.1 < results["float16"]


@pytest.mark.slow
def test_notebook(tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOK, 4)
    nbformat.validate(notebook)
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not any(output.get("name") == "stderr" for output in outputs)
    data = [output["data"] for output in outputs if "data" in output]
    (table,) = (d["text/markdown"] for d in data if "text/markdown" in d)
    rows = re.findall(r"^\| (\w+) \| ([\d.]+)% .* \| (\S[^|]*) \|$", table, re.MULTILINE)
    assert [(name, half) for name, _, half in rows] == [("float32", "0"), ("float16", "4 of 4"), ("bfloat16", "4 of 4")]
    assert all(float(accuracy) >= 95 for _, accuracy, _ in rows) and sum("image/png" in d for d in data) == 1
    doctor, explained = (d["text/html"] for d in data if "text/html" in d)
    assert "<iframe srcdoc" in doctor and "conv0" in doctor and "dot_general" in explained
    text = "".join(output["text"] for output in outputs if "text" in output)
    assert "Take float16 at loss scale 2**" in text and "4 of 4 operations of the allow list" in text
