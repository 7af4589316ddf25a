"""Float8 in experiments: one network in three libraries, errors as large as the formats say, runs that learn."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("equinox", reason="needs pip install 'mixedres[examples]'")

from experiments import float8
from experiments.autocast_comparison import distance
from experiments.in_float8 import gradients, networks, tables, training
from experiments.in_float8.networks import GPT, VIT, Sizes
from experiments.lib import runs
from mixedres.autocast import autocast

TINY = {
    GPT: Sizes(width=16, blocks=1, batch=2, places=9, words=11),
    VIT: Sizes(width=16, blocks=1, batch=2, places=4, words=10, patch=4),
}
# Where autocast is called first, it warns once a process.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:float8 is emulated")]


@pytest.fixture(autouse=True)
def promotion():
    """The networks add vectors to matrices, as programs of these libraries do."""
    with jax.numpy_rank_promotion("allow"):
        yield


def small_digits():
    sizes = Sizes(width=16, blocks=1, batch=16, places=16, words=10, patch=2, channels=1)
    return dataclasses.replace(training.images(sizes), learning_rate=1e-2)


def small_text():
    return training.text(Sizes(width=16, blocks=1, batch=2, places=9))


@pytest.mark.parametrize("kind", [GPT, VIT])
def test_libraries_have_the_same_loss_and_gradient(kind):
    sizes = TINY[kind]
    weights, batch = networks.weights(3, sizes), networks.batch(5, sizes)
    # Biases and scales that are not those of the start count, too.
    weights = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), weights)
    network = networks.plain(sizes)
    loss, gradient = jax.jit(jax.value_and_grad(network.loss))(weights, *batch)
    for make in networks.LIBRARIES.values():
        other = make(sizes)
        its_loss, its_gradient = jax.jit(jax.value_and_grad(other.loss))(other.convert(weights), *batch)
        np.testing.assert_allclose(its_loss, loss, rtol=1e-5)
        assert distance(its_gradient, other.convert(gradient)) < 1e-5


def test_a_causal_transformer_does_not_see_what_follows():
    sizes = TINY[GPT]
    weights, (tokens, _) = networks.weights(0, sizes), networks.batch(0, sizes)
    changed = tokens.at[:, 5].set((tokens[:, 5] + 1) % sizes.words)
    for make in networks.LIBRARIES.values():
        network = make(sizes)
        logits = [network.apply(network.convert(weights), x) for x in (tokens, changed)]
        np.testing.assert_array_equal(logits[0][:, :5], logits[1][:, :5])
        assert float(jnp.abs(logits[0][:, 5:] - logits[1][:, 5:]).max()) > 1e-3


def test_errors_are_those_of_the_formats():
    """bfloat16 keeps 8 digits; e4m3 keeps 4 and e5m2 3."""
    (row,) = gradients.transformers([0, 1], {VIT: TINY[VIT]})[:1]
    half, eighth = row["variants"]["bf16"], row["variants"][gradients.EVERY]
    assert half["products"] == eighth["products"] == 8
    # Not the patches, the logits of the attention and the head.
    assert half["float8"] == 0 and eighth["float8"] == 5
    # By default such small products stay in bfloat16: that is a row already.
    assert gradients.DEFAULT not in row["variants"]
    for ours, wider in zip(eighth["gradient_error"], half["gradient_error"], strict=True):
        assert 2.0**-11 < wider < 2.0**-6
        assert 2 * wider < ours < 2.0**-2


def test_the_dense_network_beside_what_flax_offers():
    row = gradients.dense([0], features=16, width=32, batch=4096)
    found = {name: one["gradient_error"][0] for name, one in row["variants"].items()}
    warm, cold = (name for name in found if "fp8_ops" in name)
    assert [row["variants"][name]["float8"] for name in ("bf16", gradients.EVERY, warm, cold)] == [0, 3, 3, 3]
    # The same products in the same formats.
    np.testing.assert_allclose(found["Flax, dtype=bfloat16"], found["bf16"], rtol=0.5)
    np.testing.assert_allclose(found[warm], found[gradients.EVERY], rtol=0.5)
    assert found[cold] > 1.5 * found[warm]


def test_runs_of_a_seed_learn_alike():
    found = training.measured("digits", small_digits(), seeds=1, steps=60)
    exact, half, eighth = ([at["loss"] for at in found["runs"][name][0]["training"]] for name in training.PRECISIONS)
    assert exact[-1] < exact[0] - 0.3
    assert exact != half != eighth
    np.testing.assert_allclose(half, exact, rtol=0.02)
    np.testing.assert_allclose(eighth, exact, rtol=0.1)
    assert 0.3 < found["runs"]["fp8"][0]["last"]["validation_accuracy"] <= 1
    *_, fp8 = tables.training({"digits": found})
    last = found["runs"]["fp8"][0]["last"], found["runs"]["fp32"][0]["last"]
    assert f"| {last[0]['validation_loss'] - last[1]['validation_loss']:+.4f} |" in fp8


def test_a_run_is_adam_by_hand():
    """Losses of the first steps, in float32 without the experiment's own loop."""
    task = small_digits()
    run = training.trained(task, training.programs(task, None, 3), seed=4, steps=3)
    rng, params = np.random.default_rng(4), networks.weights(4, task.sizes)
    first = networks.plain(task.sizes).loss(params, *task.train(rng, task.sizes.batch))
    np.testing.assert_allclose(run["training"][0]["loss"], first, rtol=1e-5)
    assert [at["step"] for at in run["training"]] == [1, 2, 3]


def test_the_text_is_windows_of_sources_and_what_follows():
    task = small_text()
    inputs, labels = task.train(np.random.default_rng(0), 3)
    np.testing.assert_array_equal(inputs[:, 1:], labels[:, :-1])
    window = bytes(inputs[0].astype(np.uint8).tolist())
    assert window in bytes(training.source(training.TEXTS).astype(np.uint8).tolist())
    assert bytes(task.held_out[0][0].tolist()) == bytes(training.source(training.HELD_OUT)[:9].tolist())


def test_a_module_without_source_is_named():
    with pytest.raises(float8.ConfigError, match="no source of its module 'sys'"):
        training.source(("sys",))


def test_a_program_in_float8_is_what_is_trained():
    task = small_digits()
    made = [training.programs(task, dtype, 1).evaluate for dtype in (None, "bf16", training.PRECISIONS["fp8"])]
    params = networks.weights(0, task.sizes)
    losses = [float(one(params, *task.held_out)[0]) for one in made]
    assert 0 < abs(losses[1] - losses[0]) < abs(losses[2] - losses[0]) < 0.05
    assert autocast(lambda x: x, "fp8")(jnp.ones(3)).dtype == jnp.float32


def test_the_command_writes_what_it_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runs, "RESULTS", tmp_path)
    monkeypatch.setattr(networks, "SIZES", TINY)
    monkeypatch.setattr(gradients, "DENSE", {"features": 16, "width": 32, "batch": 4096})
    monkeypatch.setattr(training, "TASKS", {"digits": small_digits, "text": small_text})
    assert float8.main(["--part=gradients", "--seeds=2", "--name=small"]) == 0
    assert float8.main(["--part=training", "--seeds=2", "--steps=5", "--name=runs"]) == 0
    rows = json.loads((tmp_path / "float8_small.json").read_text())["rows"]
    assert [row["network"] for row in rows] == [GPT] * 3 + [VIT] * 3 + ["dense"]
    tasks = json.loads((tmp_path / "float8_runs.json").read_text())["tasks"]
    assert (tmp_path / "float8_runs.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    for line in (*tables.gradients(rows), *tables.training(tasks)):
        assert line in printed
