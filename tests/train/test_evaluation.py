"""One set of weights under several precisions."""

import functools

import jax
import numpy as np
import pytest

from mixedres import data, main, precision, train
from mixedres._internal.cli import progress
from mixedres._internal.errors import ConfigError
from tests.amp import graphs
from tests.train import run_cases, step_cases
from tests.train.run_cases import build

pytestmark = pytest.mark.usefixtures("small_network")


def digits(preset, **overrides):
    """Digits, whose 360 images fill no last batch of 28; many classes are nearly as probable in a fresh network."""
    chosen = run_cases.tiny(preset, steps=4, batch_size=28, **overrides)
    chosen.data.name, chosen.data.train_examples, chosen.data.num_classes = "digits", None, None
    chosen.eval_every = chosen.checkpoint_every = 0
    return chosen


@pytest.fixture(scope="module")
def trained(tmp_path_factory, small_network):
    directory = tmp_path_factory.mktemp("runs") / "digits"
    with pytest.MonkeyPatch.context() as patch:
        run_cases.without_training(patch)
        summary = run_cases.fit(digits("bf16", ema_decay=0.9), directory)
    assert summary["baseline"] == pytest.approx(37 / 360)
    return directory


@pytest.mark.parametrize("preset", ["fp16", "fp16_rewrite"])
def test_compared_presets_ignore_keep_float32_of_the_run(preset):
    experiment = build(digits(preset, num_devices=1, precision__keep_float32="^/head$"))
    variables = jax.eval_shape(experiment.init_state).eval_variables
    arguments = (variables, experiment.eval_batch_shapes(), None, step_cases.step.zero_sums())
    for chosen, dtypes in ((precision.get(preset), {"f16"}), (experiment.precision, {"f16", "f32"})):
        jaxpr = jax.make_jaxpr(experiment.in_precision(chosen).eval_step())(*arguments)
        assert graphs.product_dtypes(jaxpr) == dtypes


def test_presets_are_compared_image_by_image(trained, capsys, monkeypatch):
    config, classes = digits("bf16", ema_decay=0.9), {}
    capsys.readouterr()
    results = train.compare_presets(train.plan(config, trained, evaluates=True), ["bf16"])
    printed = capsys.readouterr().out.splitlines()
    assert list(results) == ["fp32", "bf16"] and len([line for line in printed if line.startswith("bf16")]) == 1

    state = run_cases.final_state(trained, config)
    for name, found in results.items():
        experiment = build(digits(name))
        apply_fn = jax.jit(experiment.precision.rewrite(functools.partial(experiment.model.apply, train=False)))
        source = experiment.source
        classes[name] = np.asarray(apply_fn(state.ema, experiment.normalize_fn(source.eval_images))).argmax(-1)
        assert found["examples"] == 360
        assert abs(found["top1"] * 360 - (classes[name] == source.eval_labels).sum()) <= 2
        assert abs(found["changed"] - (classes[name] != classes["fp32"]).sum()) <= 2, results
    assert results["bf16"]["changed"] > 0 == results["fp32"]["changed"], results

    kept, counts = [], []
    monkeypatch.setattr(progress.ImageProgress, "add", lambda self, count: counts.append(count))
    evaluated = run_cases.evaluate(config, trained, on_results=lambda *given: kept.append(given[1]) or "a page")
    images, last = kept[0], capsys.readouterr().out.splitlines()[-1]
    assert evaluated["top1"] == results["bf16"]["top1"] and last.endswith("; a page")
    # The last batch of 28 has 24 images.
    assert counts == [28] * 12 + [24]
    np.testing.assert_array_equal(images.label, source.eval_labels)
    np.testing.assert_array_equal(images.index, np.arange(360))
    assert evaluated["top1"] == (images.predicted == images.label).mean()
    assert evaluated["loss"] == pytest.approx(images.loss.mean(dtype=float), rel=1e-6)
    assert (images.predicted != classes["bf16"]).sum() <= 2 and images.top.shape == images.probability.shape == (360, 5)
    assert all((image == source.eval_images[place]).all() for place, image in images.images.items())


def test_head_with_another_number_of_classes_is_refused(trained, tmp_path):
    source = data.Synthetic(image_shape=(8, 8, 1), num_classes=7, train_examples=64, eval_examples=16)
    other = run_cases.tiny(init_from=trained, data__num_classes=None, data__train_examples=None)
    with pytest.raises(ConfigError, match="has a head for other classes, so there is nothing to evaluate"):
        run_cases.evaluate(other, tmp_path / "none", source=source)


def test_presets_on_the_command_line():
    assert main._presets("all") == list(precision.PRESETS) and main._presets("bf16, fp16") == ["bf16", "fp16"]
