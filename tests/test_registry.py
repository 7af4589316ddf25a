"""Registered parts: every command that reads the run finds them, or says in one line what to import."""

import io
import pickle
import shutil

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from PIL import Image

import mixedres
from mixedres import checkpoints, config, data, numerics, registry
from mixedres.__main__ import run_subcommand
from mixedres._internal.errors import ConfigError
from mixedres.config import load_config, optimizer_options
from tests import ROOT
from tests.data import made
from tests.train import run_cases

PAGE = ROOT / "examples" / "own_parts.py"
OWN = {"model.name", "optimizer.name", "schedule.name", "data.augment"}


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A copy of the page of an example, at another place; what it registers goes afterwards."""
    monkeypatch.chdir(tmp_path)
    yield shutil.copy(PAGE, tmp_path)
    forget()


def forget():
    for one in (value for value in vars(registry).values() if isinstance(value, registry.Registry)):
        for name in list(one.files):
            del one[name]


def test_run_of_own_parts_is_read_by_every_command_that_imports_them(page, tmp_path, monkeypatch, capsys):
    """The doctor gets the network; examining one is for tests/doctor."""
    report, networks = numerics.examine(lambda x: x * x, jnp.float32(1)), []
    examined = "mixedres.doctor.examination.examine_network"
    monkeypatch.setattr(examined, lambda plan, *_: networks.append(plan.experiment.model) or (report, None))
    run = tmp_path / "run"
    flags = [f"--config={page}:fp16", f"--workdir={run}", "--config.epochs=1", "--config.num_devices=1"]
    assert run_subcommand(["mixedres", "train", *flags]) == 0
    assert (run / "evaluations.txt").read_text().count("top1") == 1
    assert capsys.readouterr().out.endswith(
        f"next: mixedres predict --from=run --import={page} IMAGES --out=sheet.html\n"
    )
    Image.fromarray(np.zeros((16, 16), np.uint8)).save(tmp_path / "digit.png")
    commands = {
        "eval": [f"--workdir={run}"],
        "predict": [f"--from={run}", str(tmp_path / "digit.png")],
        "export": [f"--from={run}", f"--to={tmp_path / 'exported'}", "--precision=fp32"],
        "doctor": [f"--workdir={run}", f"--out={tmp_path / 'page.html'}"],
    }
    for name, given in commands.items():
        forget()
        capsys.readouterr()
        assert run_subcommand(["mixedres", name, *given]) == 2, name
        (line,) = capsys.readouterr().err.splitlines()
        assert f"has model.name=mixer, which {page} registers; if you trust that file, add --import={page}," in line
        assert run_subcommand(["mixedres", name, *given, f"--import={page}"]) == 0, name
    assert [type(network).__name__ for network in networks] == ["Mixer"]
    forget()
    with pytest.raises(ConfigError, match=rf"mixedres\.registry\.load\('{page}'\)"):
        mixedres.load(run)
    registry.load(str(page))
    assert type(mixedres.load(run).model).__name__ == "Mixer"


def test_config_of_the_page_records_what_its_file_registers(page):
    plan = mixedres.train.plan(load_config(f"{page}:fp16"))
    assert {entry.partition(":")[0] for entry in plan.config.imports} == OWN
    assert {entry.partition(":")[2] for entry in plan.config.imports} == {str(page)}


def test_decoding_process_runs_the_file_of_an_augmentation(page):
    """A process that another one started has the augmentation as a pickle, and nothing registered."""
    registry.load(str(page))
    sent = pickle.dumps(data.load("digits", batch_size=8, image_size=16, augment="shift").augmentation)
    forget()
    image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    changed = image.copy()
    pickle.loads(sent).apply(changed, np.random.default_rng(0))
    assert sorted(changed.ravel()) == sorted(image.ravel()) and (changed != image).any()


def test_augmentation_that_changes_the_dtype_is_refused():
    registry.AUGMENTATIONS["half"] = lambda image, rng: image.astype(np.float16) / 2
    batches = data.load("digits", batch_size=8, image_size=16, augment="half").train_batches(8, seed=0)
    with pytest.raises(ValueError, match=r"'half' must return an image like the one that it takes, .*, got float16"):
        next(iter(batches))
    del registry.AUGMENTATIONS["half"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"--import=.*\.py cannot be read: No such file or directory; name NAME\.py or a module"),
        ("import nowhere", "there is no module nowhere"),
        ("1 / 0", r"ZeroDivisionError: division by zero \(.*own\.py:1\)"),
        ("def", r"own\.py, line 1: invalid syntax$"),
        ("raise SystemExit(0)", "ends the program; it must only register"),
        ("open('nothing')", r"FileNotFoundError: .*'nothing' \(.*own\.py:1\)"),
        ("from mixedres import registry\nregistry.OPTIMIZERS['sgd'] = print", "mixedres has 'sgd' itself"),
        ("from mixedres import registry\nregistry.OPTIMIZERS.update(one=3)", "'one' must be a function, got 3"),
    ],
)
def test_file_that_cannot_be_imported_is_one_line(content, message, tmp_path, capsys):
    file = tmp_path / "own.py"
    if content is not None:
        file.write_text(content)
    assert run_subcommand(["mixedres", "train", "--config=digits:fp16", "--import", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(line)


@pytest.mark.parametrize("given", ["folder", "--import", "", "a/b"])
def test_what_is_no_module_is_one_line(given, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "folder").mkdir()
    assert run_subcommand(["mixedres", "train", "--config=digits:fp16", "--import", given]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_dataclass_and_module_name_of_a_file_that_registers(tmp_path, monkeypatch):
    """A file that uses dataclasses with postponed annotations, and a module: each is recorded as it was given."""
    code = (
        "from mixedres import registry\nimport dataclasses\n@dataclasses.dataclass\nclass Own:\n    size: 'int' = 1\n"
    )
    (tmp_path / "own_module.py").write_text(
        code + "registry.SCHEDULES['own'] = lambda progress: Own().size - progress\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for given in (str(tmp_path / "own_module.py"), "own_module"):
        registry.load(given)
        assert registry.SCHEDULES.files["own"] == given
    forget()


@pytest.mark.parametrize("made", [lambda parts: None, lambda parts: (optax.sgd,)])
def test_optimizer_that_makes_no_transformation_is_refused(made, page, monkeypatch):
    monkeypatch.setitem(registry.OPTIMIZERS, "other", made)
    with pytest.raises(ConfigError, match=r"config\.optimizer: optimizer 'other' must return transformations"):
        mixedres.train.plan(config.load_config("digits:fp16,optimizer.name=other,optimizer.nesterov=false"))


def test_schedule_that_fails_is_refused_before_anything_is_written(page, tmp_path, monkeypatch):
    monkeypatch.setitem(registry.SCHEDULES, "other", lambda progress: 1 if progress > 0.5 else 0)
    with pytest.raises(ConfigError, match=r"config\.schedule: schedule 'other' fails: TracerBool"):
        mixedres.train.plan(config.load_config("digits:fp16,schedule.name=other"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_optimizer_with_an_option_that_no_key_has_is_refused(page):
    registry.OPTIMIZERS["other"] = lambda parts, *, momentum, beta3: ()
    with pytest.raises(ValueError, match=r"optimizer 'other' takes beta3, no key of config\.optimizer"):
        optimizer_options("other", {})


def test_nothing_is_imported_because_a_run_names_it(tmp_path):
    registry.check_needed({"imports": 3, "model.name": "mine"}, "a file that somebody changed")
    with pytest.raises(ConfigError, match=r"here has model\.name=mine, which /x\.py registers"):
        registry.check_needed({"imports": ["model.name:/x.py"], "model.name": "mine"}, "here")


def test_reader_of_weights_by_the_end_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setitem(registry.WEIGHTS, ".npz", lambda path: (np.load(path), "from NumPy", {}))
    variables, path = run_cases.random_variables(), tmp_path / "weights.npz"
    np.savez(path, **checkpoints.to_tensors(variables, "mixedres"))
    initial = mixedres.train.plan(run_cases.tiny(init_from=path)).initial
    assert "from NumPy" in initial.note and initial.has_head
    np.testing.assert_array_equal(initial.variables["params"]["head"]["bias"], variables["params"]["head"]["bias"])


class Corner:
    """A resize that takes the first pixels of an image."""

    dtype = np.dtype(np.uint8)

    def write_part(self, data, head, box, out, *, mirror):
        out[...] = np.asarray(Image.open(io.BytesIO(data)))[: len(out), : len(out)]

    def write_center(self, data, head, out, crop_pct):
        self.write_part(data, head, None, out, mirror=False)


def test_stored_data_set_with_its_own_pixels_and_look(tmp_path, monkeypatch):
    """What the rooms of TensorFlow and of photographs add, a third person adds: images, crops, pixels, a look."""
    made.write_files(tmp_path / "photos", {f"{name}/{i}.png": b"" for name in "ab" for i in range(5)})
    pixels = made.noise(9, 12, 3)
    for path in (tmp_path / "photos").rglob("*.png"):
        path.write_bytes(made.encoded(pixels, "PNG"))
    own = data.Preprocessing("own", lambda rng, height, width: None, "corner", (0.0,) * 3, (1.0,) * 3)
    monkeypatch.setitem(registry.PREPROCESSINGS, "own", lambda: own)
    monkeypatch.setitem(registry.RESIZES, "corner", Corner)
    monkeypatch.setitem(registry.LOOKS, "own", lambda data_set, options: f"looked at {len(data_set.train)}")
    monkeypatch.setitem(registry.SOURCES, "mine:", lambda options, name: data.scan(str(tmp_path / name)))
    options = {"image_size": 4, "preprocessing": "own", "batch_size": 4}
    for given in ({"name": "mine:photos"}, {"name": "folder", "dir": str(tmp_path / "photos")}):
        source = data.load(**given, **options)
        assert ("looked at 8" in source.note) == (given["name"] == "folder")
        for batch in (next(source.train_batches(4, seed=0)), next(source.eval_batches(2))):
            np.testing.assert_array_equal(batch["image"][0], pixels[:4, :4])
    assert source.input_spec.resize == "corner" and source.input_spec.image_dtype == np.uint8


def test_decoding_process_runs_the_file_of_a_preprocessing(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "from mixedres import data, registry\n"
        "own = data.Preprocessing('own', lambda *_: None, 'area', (1.0,) * 3, (2.0,) * 3)\n"
        "registry.PREPROCESSINGS['own'] = lambda: own\n"
    )
    registry.load(str(file))
    sent = pickle.dumps(data.get_preprocessing("own"))
    del registry.PREPROCESSINGS["own"]
    assert pickle.loads(sent).mean == (1.0,) * 3 and registry.PREPROCESSINGS.files["own"] == str(file)
    del registry.PREPROCESSINGS["own"]


class Table:
    """An output of predict."""

    def __init__(self, path):
        self.path, self.rows = path, []

    def begin(self, classifier, source, paths, topk):
        self.classes = len(classifier.class_names)

    def add(self, prediction, square):
        self.rows.append(f"{prediction.name},{len(prediction.top) == self.classes},{square.shape}")

    def write(self):
        self.path.write_text("\n".join(self.rows))
        return f"{len(self.rows)} rows"


@pytest.mark.usefixtures("small_network")
def test_output_of_predict_by_the_end_of_its_name(place, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(registry.OUTPUTS, ".tsv", Table)
    image = next((place / "images" / "val").rglob("*.jpg"))
    given, out = ["mixedres", "predict", f"--from={place / 'run'}", str(image)], tmp_path / "p.tsv"
    assert run_subcommand([*given, f"--out={out}"]) == 0
    assert out.read_text().endswith(",True,(24, 24, 3)") and f"1 rows: {out}" in capsys.readouterr().err
    assert run_subcommand([*given, f"--out={tmp_path / 'p.txt'}"]) == 2
    assert "must end in .html or .csv or .tsv" in capsys.readouterr().err
