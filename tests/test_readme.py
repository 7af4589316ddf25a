"""What the documents show runs, and the numbers they quote are those in the files."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mixedres
from experiments import input as input_command
from experiments import readme
from mixedres import precision
from mixedres.config.keys import KEYS
from tests import ROOT
from tests.arrays import normal

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
README = (ROOT / "README.md").read_text()


def python_blocks(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


def run(example):
    """The names that an example leaves."""
    names = {}
    exec(compile(example, "example.py", "exec"), names)
    return names


def test_readme_is_short():
    assert len(README.splitlines()) <= 130
    assert README.count("![") == 1
    assert len(re.findall(r"^\|", readme.summary(), re.MULTILINE)) - 2 <= 12


def test_example_of_the_readme_trains_in_float16(capsys):
    example, _ = python_blocks(ROOT / "README.md")
    assert len(example.splitlines()) <= 40
    names = run(example)
    assert names["loss"] < 0.1 and names["loss"].dtype == np.float32
    assert capsys.readouterr().out.startswith("loss 0.0")
    program = names["step"].lower(names["params"], names["state"]).as_text()
    products = re.findall(r"dot_general .*: \((.*)\) ->", program)
    assert len(products) == 5 and all(operands.count("xf16>") == 2 for operands in products)


def test_code_of_readme_and_docs_shows_the_printed_report(capsys):
    page = ROOT / "docs" / "autocast.md"
    worked, _ = python_blocks(page)
    _, short = python_blocks(ROOT / "README.md")
    with jax.numpy_rank_promotion("allow"):  # as users run it
        names = run(worked)
        report = capsys.readouterr().out
        exec(compile(short, "example.py", "exec"), names)
        assert capsys.readouterr().out == report
        args = (names[name] for name in ("params", "images", "labels"))
        assert "preferred_element_type=float16" in str(jax.make_jaxpr(names["half_loss"])(*args))
    assert report == re.search(r"```text\n(autocast of .*?)```", page.read_text(), re.DOTALL)[1]


def test_rewritten_loop_of_the_docs_trains():
    _, loop = python_blocks(ROOT / "docs" / "autocast.md")
    names = run(loop)
    assert names["loss"] < 0.1 and names["loss"].dtype == np.float32
    assert "preferred_element_type=float16" in str(jax.make_jaxpr(names["step"])(names["params"], names["state"]))


def test_repeated_batches_of_the_docs_take_the_steps_of_float32():
    """Without repeats, the first batches would be lost, until the scale is low enough."""
    imports, at_minimum, once, _, repeated = python_blocks(ROOT / "docs" / "precision.md")
    names = run("\n".join((imports, once, repeated)))
    batches = [{"x": normal(i, (32, 8)), "y": normal(i + 99, (32, 2))} for i in range(20)]
    params = plain = {"w": normal(0, (8, 2))}
    tx = names["precision"].loss_scaled(names["clipped"], names["precision"].DynamicLossScale(2.0**24))
    state, plain_state = tx.init(params), names["clipped"].init(params)
    lost = names["step"](params, state, batches[0])
    assert not lost[1].grads_finite and (lost[0]["w"] == params["w"]).all()
    for batch in batches:
        params, state, loss = names["patient_step"](params, state, batch)
        value, grads = jax.value_and_grad(names["loss_fn"])(plain, batch)
        updates, plain_state = names["clipped"].update(grads, plain_state, plain)
        plain = names["optax"].apply_updates(plain, updates)
        np.testing.assert_allclose(loss, value, rtol=1e-3)
    assert state.inner_state[1][0].count == len(batches) and state.loss_scale.total_skipped >= 5
    np.testing.assert_allclose(params["w"], plain["w"], atol=2e-4)
    assert np.abs(params["w"] - normal(0, (8, 2))).max() > 0.1
    broken = batches[0] | {"x": jnp.full((32, 8), jnp.nan)}
    _, state, _ = names["patient_step"](params, state, broken)
    _, state, _ = names["patient_step"](params, state, broken)
    with pytest.raises(FloatingPointError, match="40 steps in a row were skipped"):
        exec(at_minimum, names | {"state": state})


def test_input_costs_equal_the_results_file():
    results = json.loads((ROOT / "experiments" / "results" / "input_loaders.json").read_text())
    page = (ROOT / "docs" / "data.md").read_text()
    assert "\n".join(input_command.loaders(results["medians"])) in page
    assert "\n".join(input_command.ratios(results["rows"])) in page
    words = " ".join(page.split())
    assert f"medians of {results['rounds']} rounds" in words and results["processor"].rstrip() in words
    assert f"{results['memory']['growth']:+.1%}" in words


def test_batches_of_the_docs(capsys):
    (example,) = python_blocks(ROOT / "docs" / "data.md")
    run(example)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(line.startswith("(32, 16, 16, 1) uint8 [") for line in lines)


def test_config_of_the_docs_is_a_config():
    (example,) = python_blocks(ROOT / "docs" / "training.md")
    assert run(example)["get_config"]("fp16,epochs=3").epochs == 3.0


# The flags of TensorFlow's official ResNet that matter to its users.
FLAGS = """
data_dir model_dir clean resnet_size resnet_version train_epochs max_train_steps epochs_between_evals skip_eval
eval_only stop_threshold batch_size num_gpus distribution_strategy worker_hosts task_index dtype loss_scale
fp16_implementation use_synthetic_data pretrained_model_checkpoint_path fine_tune enable_lars label_smoothing
weight_decay export_dir image_bytes_as_serving_input profile_steps datasets_num_private_threads all_reduce_alg
data_format
"""


def test_migration_examples_run():
    page = ROOT / "docs" / "migration.md"
    with jax.numpy_rank_promotion("allow"):
        names = run("\n".join(python_blocks(page)))
    assert names["loss"] < 0.2 and names["loss"].dtype == np.float32
    params, steps, state = names["params"], (names["step"], names["by_hand"]), names["tx"].init(names["params"])
    for step in steps:
        assert "preferred_element_type=float16" in str(jax.make_jaxpr(step)(params, state))
    moved = [step(params, state)[0]["w2"] for step in steps]  # equal up to the rounding of float16
    assert np.abs(moved[0]).max() > 0
    np.testing.assert_allclose(*moved, atol=2e-3 * np.abs(moved[0]).max())
    assert names["train_state"].step == 1 and int(names["train_state"].opt_state.loss_scale.total_skipped) == 0
    assert {g.dtype for g in jax.tree.leaves(names["bf16_grads"])} == {np.dtype(np.float32)}
    assert "dot_general" in str(names["report"])
    text = page.read_text()
    assert [flag for flag in FLAGS.split() if not re.search(rf"^\| .*`--{flag}\b", text, re.MULTILINE)] == []


def test_results_are_made_from_the_files():
    """python -m experiments.readme writes them."""
    assert f"{readme.BEGIN}\n\n{readme.summary()}\n\n{readme.END}" in README
    assert readme.PAGE.read_text() == readme.page()
    for name in readme.SHOWN:
        assert (readme.IMAGES / name).read_bytes() == (readme.RESULTS / name).read_bytes(), name


def test_table_of_presets_is_complete():
    page = (ROOT / "docs" / "precision.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([^|]*) \|", page, re.MULTILINE)
    shown = {name: (dtype, scale) for name, dtype, scale in rows if name in precision.PRESETS}
    assert set(shown) == set(precision.PRESETS)
    for name in precision.PRESETS:
        preset = precision.get(name)
        dtype, scale = shown[name]
        assert dtype == np.dtype(preset.policy.compute_dtype).name
        expected = f"{preset.loss_scale:g}" if isinstance(preset.loss_scale, float) else preset.loss_scale
        assert scale.strip().startswith(expected)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_keys_exist(path):
    text = path.read_text()
    docs = ROOT / "docs"
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        found = (path.parent / target).resolve()
        assert found.exists(), target
        # the site has only what is in docs/
        assert docs not in path.parents or docs in found.parents, target
    for key in re.findall(r"--config\.([\w.]+)=", text):
        assert key in {k.path for k in KEYS} or key == "KEY", key
    for file in re.findall(r"\b(?:configs|experiments|tests)/[\w/]+\.[a-z]+\b", text):
        assert (ROOT / file).exists(), file
    if path.name == "CHANGELOG.md":  # names what is gone
        return
    for key in re.findall(r"`((?:batch_norm|data|loss_scale|optimizer|schedule)\.\w+)[`=]", text):
        assert key in {k.path for k in KEYS} or key.endswith((".json", ".py")), key
    for file in re.findall(r"\bmixedres/[\w/]+\.py\b", text):
        assert (ROOT / file).exists(), file
    for module in re.findall(r"(?:python -m |`)((?:mixedres|experiments)(?:\.\w+)+)", text):
        assert is_command_or_name(module), module


def is_command_or_name(dotted):
    """Whether `mixedres.a.b` is a module, or the name b of the module mixedres.a."""
    *parents, name = dotted.split(".")
    place = ROOT.joinpath(*parents)
    if (place / name).is_dir() or (place / f"{name}.py").exists():
        return True
    source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return source.exists() and bool(re.search(rf"\b{name}\b", source.read_text()))


def test_commands_of_the_pages_run_as_modules():
    """A package needs __main__.py for python -m."""
    for module in re.findall(r"python -m ((?:mixedres|experiments)(?:\.\w+)+)", "".join(p.read_text() for p in PAGES)):
        place = ROOT.joinpath(*module.split("."))
        assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), module


def test_citation_and_package_have_one_version():
    assert re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1] == mixedres.__version__
