"""Runs from Python: the same numbers as the commands, for paths, arrays and data sets of one's own."""

import itertools
import json
import pathlib
import tempfile

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mixedres
from mixedres import checkpoints, data, main, train
from mixedres._internal.errors import ConfigError, DataError
from mixedres.train import evaluation as evaluating
from mixedres.train import planning
from tests.train import run_cases
from tests.train.run_cases import tiny


class Stripes(data.DataInfo):
    """Images of stripes across or along, by label."""

    fingerprint = "stripes"

    def train_batches(self, batch_size, *, seed, first_step=0, shard):
        for step in itertools.count(first_step):
            labels = np.random.default_rng((seed, step)).integers(0, 2, batch_size, np.int32)
            yield {"image": self.images(labels), "label": labels}

    def eval_batches(self, batch_size, *, shard):
        labels = np.arange(batch_size, dtype=np.int32) % 2
        yield {"image": self.images(labels), "label": labels, "mask": np.ones(batch_size, bool)}

    def images(self, labels):
        across = np.broadcast_to(np.arange(8)[:, None] % 2 * 250, (8, 8)).astype(np.uint8)
        return np.where(labels[:, None, None] == 0, across, across.T)[..., None]


STRIPES = {"image_shape": (8, 8, 1), "num_classes": 2, "train_examples": 64, "eval_examples": 16}


@pytest.fixture(scope="module")
def stripes(tmp_path_factory):
    """A run on a data set of one's own, with its workdir."""
    with pytest.MonkeyPatch.context() as patch:
        run_cases.shrink(patch)
        directory = tmp_path_factory.mktemp("stripes") / "run"
        config = tiny("fp16", steps=12, optimizer__learning_rate=0.2, optimizer__lr_reference_batch=0)
        source = Stripes(class_names=("across", "along"), **STRIPES)
        yield mixedres.fit(config, workdir=directory, source=source), directory


def test_run_of_own_data_has_weights_metrics_and_predictions(stripes):
    run, _ = stripes
    assert run.summary["eval"]["top1"] == 1.0 and run.config.data.name == "Stripes"
    assert [row["step"] for row in run.metrics if row["kind"] == "eval"] == [2, 4, 6, 8, 10, 12]
    assert run.evaluate() == run.summary["eval"]
    images = run.source.images(np.array([1, 0, 1], np.int32))
    found = run.predict([images[0], images[1:]], top=1)
    assert [one.name for one in found] == ["along", "across", "along"]
    normalize = mixedres.models.normalization(None, None)
    apply = jax.jit(lambda variables, x: jax.nn.softmax(run.model.apply(variables, normalize(x), train=False)))
    expected = np.asarray(apply(run.variables, images)).max(1)
    np.testing.assert_allclose([one.probability for one in found], expected, rtol=1e-3)


def test_checkpoints_have_names(stripes, monkeypatch):
    _, directory = stripes
    best = checkpoints.RecordedRun(directory).summary()["best"]["step"]
    kept = checkpoints.RecordedRun(directory).steps()
    assert {best, 12} <= set(kept)
    newest = checkpoints.RecordedRun(directory)._record()
    for top1, step in ((newest["best"]["top1"], 12), (0.0, best)):  # of equals the newest
        record = newest | {"evaluated": {"step": 12, "top1": top1}}
        monkeypatch.setattr(checkpoints.RecordedRun, "_record", lambda self, record=record: record)
        assert checkpoints.RecordedRun(directory).step_named("best") == step
    by_name = {name: mixedres.load(f"{directory}{name}").variables for name in ("", "@12", "@best", f"@{best}")}
    weights = {name: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for name, tree in by_name.items()}
    np.testing.assert_array_equal(weights[""], weights["@12"])
    np.testing.assert_array_equal(weights["@best"], weights[f"@{best}"])
    assert (weights["@12"] != weights["@best"]).any()
    first = next(row for row in mixedres.load(directory).metrics if row["kind"] == "eval" and row["step"] == best)
    source = Stripes(class_names=("across", "along"), **STRIPES)
    assert mixedres.load(f"{directory}@best").evaluate(source=source)["loss"] == pytest.approx(first["loss"], rel=1e-6)
    for name, words in (("@7", f"has no checkpoint of step 7; it has {', '.join(map(str, kept))}"), ("@last", "exist")):
        with pytest.raises(ConfigError, match=words):
            mixedres.load(f"{directory}{name}")


def test_finished_run_is_only_read(stripes, capsys):
    run, directory = stripes
    again = mixedres.fit(run.config, workdir=directory, source=run.source)
    assert "this run is finished" in capsys.readouterr().out and again.summary["train"]["first_step"] == 0
    # Before a trainer is built, which takes seconds, and so is another config.
    assert train.plan(run.config, directory, source=run.source).finished == run.summary
    with pytest.raises(ConfigError, match="seed: "):
        train.plan(tiny("fp16", seed=7), directory, source=run.source)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"num_classes": 1}, "a run needs 2 classes"),
        ({"image_shape": (8, 8)}, r"image_shape is \(8, 8\); it must be \(height, width, channels\)"),
        ({"class_names": ("a", "b", "c")}, "has 3 names for 2 classes"),
        ({"mean": (0.0,)}, "mean is .*; it must be given with std"),
        ({"mean": (0.0,), "std": (0.0,)}, "mean is .*; it must be one number per channel, beside a std of one above 0"),
        ({"eval_examples": 16.0}, "source=Stripes: eval_examples cannot be recorded .Expected `int`, got `float`"),
    ],
    ids=str,
)
def test_wrong_facts_of_own_data_write_nothing(facts, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        mixedres.fit(tiny("fp32", steps=2), workdir=tmp_path / "run", source=Stripes(**STRIPES | facts))
    with pytest.raises(
        ConfigError, match=r"has no image_shape, .*train_batches.*; derive the class from mixedres.data"
    ):
        mixedres.fit(tiny("fp32", steps=2), workdir=tmp_path / "run", source=object())
    with pytest.raises(ConfigError, match="augment in train_batches"):
        mixedres.fit(tiny("fp32", data__erasing=0.5), workdir=tmp_path / "run", source=Stripes(**STRIPES))
    assert not list(tmp_path.iterdir())


# Facts of a source: right ones, those of NumPy, and what a slip makes of them.
ODD = st.sampled_from(
    [
        *(None, "2", "", b"x", 2.0, float("nan"), 0, -1, 10**10, (10**400,), [], {}, object(), ("a", "a"), True),
        *(np.int64(2), np.float32(3), np.zeros(1), np.ones((1, 1)), np.array(["a", "b"]), (np.int8(8),) * 3),
        *((8, 8, 1), [8, 8, 1], (8.0, 8, 1), "881", (1.0,), (0.0,), (-1.0,), ("1",), (float("inf"),)),
        *(("a" * 1500, "b"), ("\x1b\n", "\udc80"), ["a", "b"], (b"a", b"b"), np.dtype(object), "uint8"),
    ]
)


@settings(max_examples=75)
@given(facts=st.dictionaries(st.sampled_from([*data.Source.__annotations__, "fingerprint", "sizes"]), ODD, max_size=3))
def test_run_can_read_what_it_takes_from_a_source(facts):
    source = Stripes(**STRIPES)
    for name, value in facts.items():
        setattr(source, name, value)
    with tempfile.TemporaryDirectory() as folder:
        directory = pathlib.Path(folder) / "run"
        try:
            plan = train.plan(tiny("fp32", num_devices=1), directory, source=source)
        except ConfigError as error:
            assert str(error).isprintable() and not directory.exists()
            return
        config, identity, run = plan.experiment.resolved, plan.experiment.data, checkpoints.RunDirectory(directory)
        with run.claim(config, clean=False):
            run.begin(config, identity)
        read = run.data()
        assert read == json.loads(json.dumps(identity)) and data.InputSpec.from_json(read["input"]) == source.input_spec
        assert len(read["class_names"]) <= read["num_classes"]
        run.check_claim(config, clean=False, data=identity)


def test_source_may_fill_its_arrays_again():
    experiment = train.plan(tiny("fp32", num_devices=1), source=Stripes(**STRIPES)).experiment
    batch = next(experiment.source.train_batches(16, seed=0, shard=data.Shard()))
    batch = {key: aligned(array) for key, array in batch.items()}  # as XLA takes it without a copy
    before = {key: array.copy() for key, array in batch.items()}
    placed = experiment.shard_batch(batch)
    for array in batch.values():
        array[...] = 1 - array
    for key, array in before.items():
        np.testing.assert_array_equal(placed[key], array)
        assert (batch[key] != array).any()


def aligned(array):
    """A copy whose first byte has an address that is a multiple of 64."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def test_iterator_may_fill_one_image_again(stripes):
    def frames():
        image = np.zeros((8, 8, 1), np.uint8)
        for label in (1, 0, 1):
            image[...] = stripes[0].source.images(np.array([label]))[0]
            yield image

    assert [one.name for one in stripes[0].predict(frames(), top=1)] == ["along", "across", "along"]


def test_test_images_without_an_end_are_an_error(stripes):
    class Endless(Stripes):
        def eval_batches(self, batch_size, *, shard):
            return itertools.cycle(list(super().eval_batches(batch_size, shard=shard)))

    with pytest.raises(DataError, match="more test images came than the 16 of eval_examples"):
        stripes[0].evaluate(source=Endless(**STRIPES))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (lambda batch: tuple(batch.values()), "a batch is tuple; it must be a dictionary with image, label, mask"),
        (lambda batch: {"image": batch["image"], "label": batch["label"]}, "a batch is image, label; it must be"),
        (
            lambda batch: batch | {"index": np.arange(16)},
            "a batch is .*, index; it must be .* image, label, mask alone",
        ),
        (lambda batch: batch | {"label": [0] * 16}, "'label' of a batch is a builtins.list; it must be an array of"),
        (lambda batch: batch | {"image": np.ma.array(batch["image"])}, "is a numpy.ma.*MaskedArray; it must be an"),
        (lambda batch: batch | {"image": batch["image"][:9]}, r"uint8\[9, 8, 8, 1\]; it must be uint8\[16, 8, 8, 1\]"),
        (lambda batch: batch | {"image": np.float32(batch["image"])}, "is float32.*; it must be uint8"),
    ],
)
def test_batches_of_own_data_are_checked(changed, words):
    source = Stripes(**STRIPES)
    (batch,) = source.eval_batches(16, shard=data.Shard())
    data.check_batch(batch, source, "own", 16, has_mask=True)
    with pytest.raises(DataError, match=words):
        data.check_batch(changed(batch), source, "own", 16, has_mask=True)
    batches = data.endless(iter([batch]), "own")
    assert next(batches) is batch
    with pytest.raises(DataError, match="own ended after 1 batches; train_batches must yield batches without end"):
        next(batches)


def test_flags_reach_the_run(stripes, tmp_path, monkeypatch):
    """As keys reach one that is trained from Python."""
    plans = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "fit", lambda plan, **given: plans.append(plan) or {})
    monkeypatch.setattr(mixedres.run, "load", lambda directory: stripes[0])
    small = {"data.image_size": 8, "data.train_examples": 64, "epochs": 2.5, "batch_size": 8}
    flags = [f"--config.{key}={value}" for key, value in small.items()] + ["--config.schedule.warmup=9 steps"]
    name = "--config=cifar10:bf16,data=synthetic,model=cifar_resnet32,data.num_classes=4"
    assert main.main(["mixedres", name, *flags, "--clean"]) == 0
    small |= {"data": "synthetic", "model": "cifar_resnet32", "data.num_classes": 4, "schedule.warmup": "9 steps"}
    mixedres.fit("cifar10:bf16", small, workdir=tmp_path / "runs" / "cifar10-bf16", clean=True)
    ours, theirs = plans
    assert ours.experiment.resolved == theirs.experiment.resolved and ours.directory == theirs.directory
    assert ours.clean and (ours.config.model.name, ours.config.epochs) == ("cifar_resnet32", 2.5)
    assert ours.source.train_examples == 64 and ours.experiment.warmup_steps == 9


def test_network_of_the_weights_is_taken(stripes, tmp_path):
    source, directory = stripes[0].source, stripes[1]
    with pytest.raises(ConfigError, match=r"model\.name=auto takes the network of config\.init_from; set"):
        train.plan(tiny(model="auto"))
    wanted = tiny(model="auto", init_from=f"{directory}@best")
    assert train.plan(wanted, source=source).config.model.name == "cifar_resnet8"
    # A run that goes on needs the weights no more.
    gone = tiny(model="auto", init_from="gone.safetensors")
    recorded = checkpoints.RecordedRun(directory).config() | {"model.name": "cifar_resnet14", "model.version": "1"}
    network = planning._with_network(gone, recorded, None).model
    assert (network.name, network.version) == ("cifar_resnet14", "1")
    with pytest.raises(ConfigError, match=r"gone\.safetensors does not exist"):
        train.plan(gone, tmp_path)


def test_function_ends_a_run(tmp_path, monkeypatch, capsys):
    """It sees each evaluation, and the newest again where a run goes on."""
    run_cases.shrink(monkeypatch)
    seen = []

    def end_at_4(evaluation):
        seen.append(evaluation)
        return evaluation["step"] >= 4

    given = {"workdir": tmp_path / "run", "on_evaluation": end_at_4}
    run = mixedres.fit(tiny(steps=10, eval_every="2 steps"), **given)
    assert [one["step"] for one in seen] == [2, 4] and seen[1]["epoch"] == 1
    assert seen[1].items() >= {key: run.summary["eval"][key] for key in ("top1", "top5", "loss", "examples")}.items()
    assert (run.summary["train"]["steps"], run.summary["train"]["stopped_by"]) == (4, "on_evaluation")
    assert (
        run.summary["classes"]["macro_f1"] <= 1 and sum(row["images"] for row in run.summary["classes"]["rows"]) == 16
    )
    assert "stopped by on_evaluation after 1 of 2.5 epochs: test top-1" in capsys.readouterr().out
    mixedres.fit(run.config, **given)
    assert len(seen) == 2 and "it was stopped by on_evaluation; --clean starts over" in capsys.readouterr().out
    mixedres.fit(tiny(steps=12, eval_every="2 steps"), **given)  # longer, but ended again
    assert [one["step"] for one in seen] == [2, 4, 4] and seen[2] == seen[1]
    longer = mixedres.fit(tiny(steps=14, eval_every="2 steps"), workdir=tmp_path / "run")
    assert longer.summary["train"]["steps"] == 14 and longer.summary["train"]["stopped_by"] is None


def test_function_sees_every_step_once_and_in_order(tmp_path, monkeypatch):
    run_cases.shrink(monkeypatch)
    seen = []
    given = {
        "workdir": tmp_path / "run",
        "on_step": lambda step: seen.append({**step, "sum": float(jax.numpy.ones(2).sum())}),
    }
    mixedres.fit(tiny(steps=4), **given)
    run = mixedres.fit(tiny(steps=7), **given)  # goes on
    assert [one["step"] for one in seen] == [1, 2, 3, 4, 5, 6, 7]
    logged = {row["step"]: row for row in run.metrics if row["kind"] == "train"}
    assert {one["step"]: one["loss"] for one in seen} == {step: row["loss"] for step, row in logged.items()}
    assert all(one["grads_finite"] and one["loss_scale"] == 2**15 for one in seen)


@pytest.mark.parametrize("name", ["evaluation", "step"])
def test_what_is_no_function_is_refused_before_the_run(tmp_path, name):
    with pytest.raises(ConfigError, match=f"on_{name} is 3; it must be a function of the {name}"):
        mixedres.fit(tiny(steps=10), workdir=tmp_path / "run", **{f"on_{name}": 3})
    assert not any(tmp_path.iterdir())


def test_patience_ends_a_run_that_gets_no_better(tmp_path, monkeypatch, capsys):
    """The best is the first evaluation of the highest top-1."""
    run_cases.shrink(monkeypatch)
    means, measured = evaluating.means, iter([0.25, 0.5, 0.5, 0.125, 0.25])
    monkeypatch.setattr(evaluating, "means", lambda sums: means(sums) | {"top1": next(measured)})
    summary = run_cases.fit(tiny(patience="4 steps", steps=10), tmp_path / "run")
    assert (summary["train"]["steps"], summary["train"]["stopped_by"]) == (8, "patience")
    assert (summary["best"], summary["eval"]["top1"]) == ({"step": 4, "top1": 0.5}, 0.125)
    assert "stopped by patience=4 steps after 2 of 2.5 epochs: test top-1" in capsys.readouterr().out
    # The same patience finds the run finished; without patience it goes on to its end.
    recorded = checkpoints.RecordedRun(tmp_path / "run")
    assert recorded.finished(recorded.config()) is not None and set(recorded.steps()) >= {4, 8}
    assert run_cases.fit(tiny(patience=0, steps=10), tmp_path / "run")["train"]["steps"] == 10
