"""Configs: golden texts of every experiment and preset, durations, and assignments."""

import copy
import functools
import importlib
import json

import jax.numpy as jnp
import numpy as np
import pytest

from mixedres import checkpoints, precision, train
from mixedres import config as base
from mixedres._internal import names
from mixedres._internal.errors import ConfigError, config_errors
from mixedres.config import FREE, KEYS, duration_in_steps, parse_flags
from tests import GOLDEN, ROOT
from tests.data import made

RECIPES = ("imagenet,recipe=estimator", "imagenet,recipe=lars", "imagenet,recipe=cosine")
EXPERIMENTS = ("digits", "cifar10", "fashion_mnist", "imagenet", *RECIPES, "folder", "finetune", "tfds")
# Those of TensorFlow, which scaled by 128 in float16.
STATIC_SCALE = ("cifar10", "imagenet", "imagenet,recipe=estimator", "imagenet,recipe=lars")


def resolve(experiment: str, preset: str):
    name, _, rest = experiment.partition(",")
    return importlib.import_module(f"configs.{name}").get_config(",".join(filter(None, (preset, rest))))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_config_is_as_recorded(experiment):
    """Only what differs from the defaults is recorded, so that a new key changes no golden text."""
    defaults = base.flatten(base.defaults())
    for preset in precision.PRESETS:
        flat = base.flatten(resolve(experiment, preset))
        base.validate(resolve(experiment, preset))
        assert flat.pop("precision.name") == preset
        is_static = experiment in STATIC_SCALE and preset.startswith("fp16")
        assert flat.pop("precision.loss_scale") == (128 if is_static else None)
        changed = {key: value for key, value in flat.items() if value != defaults[key]}
        text = json.dumps(changed, indent=2) + "\n"
        assert text == (GOLDEN / f"config_{experiment.replace(',recipe=', '_')}.json").read_text()


DURATIONS = {2: 40, 0.5: 10, "2": 40, "1 epoch": 20, "1.5 epochs": 30, "7 steps": 7, "1 step": 1, 0: 0, " 3epochs ": 60}
DURATIONS |= {0.49: 10, 0.0001: 1, "0.4 steps": 1}  # not 0, which means "at the end alone"
DURATIONS |= {0.125: 3}  # halves go up


@pytest.mark.parametrize("given", DURATIONS)
def test_durations_in_steps(given):
    assert duration_in_steps(given, 20) == DURATIONS[given]


def test_defaults_hold_every_key_once():
    flat = base.flatten(base.defaults())
    assert flat == {key.path: key.default for key in KEYS}
    assert len({key.path for key in KEYS}) == len(KEYS)
    for key in KEYS:
        assert key.default is None or key.range.allows(key.default), key.path
        assert key.doc


def test_argument_after_the_colon():
    assert base.split("") == ("fp32", {})
    assert base.split("bf16,a=1,b.c=x=y") == ("bf16", {"a": "1", "b.c": "x=y"})
    assert base.split("model=resnet18") == ("fp32", {"model": "resnet18"})
    assert base.split("fp16,a=(1,'5 steps'),b=[2,3]") == ("fp16", {"a": "(1,'5 steps')", "b": "[2,3]"})


def test_value_error_of_the_library_names_the_key():
    with pytest.raises(base.ConfigError, match=r"^config\.model: no such thing$"), config_errors("config.model"):
        raise ValueError("no such thing")
    with pytest.raises(KeyError), config_errors("config.model"):
        raise KeyError("a defect of ours stays what it is")


def test_list_nested_in_lists_is_refused():
    nested = functools.reduce(lambda inner, _: [inner], range(800), 3)
    with pytest.raises(ConfigError, match=r"^config\.batch_size is "):
        base.unflatten({"batch_size": nested})


def test_recorded_number_out_of_range_names_the_key():
    with pytest.raises(ConfigError, match=r"config\.optimizer\.momentum is"):
        base.unflatten({"optimizer.momentum": 10**400})


def test_help_shows_the_names_of_the_library():
    assert sorted(names.LAYOUTS) == sorted(checkpoints.LAYOUTS)


@pytest.mark.parametrize(
    "given", [["--config=digits:fp16"], ["--config", "digits:fp16"], ["-config=configs/digits.py"]]
)
def test_shipped_recipe_is_found_by_name(given, tmp_path, monkeypatch):
    """Only the value of --config is a name of a recipe, whatever else has the same text."""
    monkeypatch.chdir(tmp_path)
    argv = [*given, "--workdir=digits:fp16", "--config.data.name=digits", "--config.precision.name=fp16"]
    values = parse_flags(argv)
    assert (values.workdir, values.config.data.name) == ("digits:fp16", "digits")
    in_full = parse_flags([f"--config={ROOT}/configs/digits.py:fp16"])
    assert base.flatten(values.config) == base.flatten(in_full.config)
    assert values.default_workdir == "runs/digits-fp16"


read_run = checkpoints.RecordedRun.read_portable_config


def test_evaluation_takes_the_config_of_the_run(tmp_path):
    trained = parse_flags(["--config=digits:fp16,model=cifar_resnet8"]).config
    (tmp_path / checkpoints.workdir.CONFIG).write_text(json.dumps(base.flatten(trained)))
    argv = ["--mode=eval", f"--workdir={tmp_path}", "--config.seed=7"]
    values = parse_flags(argv, read_run)
    defaults = {key.path: key.default for key in KEYS if not key.is_portable}
    assert base.flatten(values.config) == base.flatten(trained) | defaults | {"seed": 7}
    assert values.workdir == str(tmp_path)
    (tmp_path / checkpoints.workdir.CONFIG).write_text("{")
    with pytest.raises(ConfigError, match="holds no run whose config can be read"):
        parse_flags(argv, read_run)


def test_recorded_config_sets_nothing_on_this_machine(tmp_path):
    """A key that a later start may change is not taken from a run, unless `Key.is_portable` names it."""
    given = {"data.workers": 3, "keep_checkpoints": 9, "log_every": 9, "profile": "1:2", "compilation_cache": "/c"}
    given |= {"wandb": "w", "init_from": "/i", "data.dir": "/d\x1b[2J", "data.threads": 2, "data.max_pixels": 2**31 - 1}
    given |= {"numerics.every": 1, "eval_every": 1, "checkpoint_every": 1, "stop_at_top1": 0.5, "patience": 9}
    given |= {"batch_size_per_device": 9, "log_resources_every": 1.0, "imports": ("data.name:/x.py",)}
    assert given.keys() == {key.path for key in KEYS if not key.is_portable}
    portable = {key.path for key in KEYS if key.resume == FREE} - given.keys()
    assert portable == {"num_devices", "model.fused", "data.on_error", "max_consecutive_skips"}
    trained = base.flatten(parse_flags(["--config=digits:fp16"]).config)
    (tmp_path / checkpoints.workdir.CONFIG).write_text(json.dumps(trained | given | {"model.fused": "false"}))
    config = parse_flags(["--mode=eval", f"--workdir={tmp_path}"], read_run).config
    defaults = base.flatten(base.defaults())
    assert base.flatten(config) == trained | {path: defaults[path] for path in given} | {"model.fused": "false"}
    (note,) = checkpoints.RecordedRun(tmp_path).left_to_command_line(config)
    assert "--config.data.dir='/d" in note and "compilation_cache" not in note
    config.data.dir, config.data.threads, config.data.max_pixels = "/mine", 1, 1
    assert checkpoints.RecordedRun(tmp_path).left_to_command_line(config) == []


def test_file_goes_before_a_shipped_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = (ROOT / "configs" / "digits.py").read_text().replace("return base", "config.seed = 5\n    return base")
    (tmp_path / "digits.py").write_text(source)
    assert parse_flags(["--config=digits.py:fp16"]).config.seed == 5


SPELLINGS = [
    ("data.flip", "true", True),
    ("data.flip", "False", False),
    ("epochs", "1e1", 10.0),
    ("batch_size", "0x20", 32),
    ("schedule.warmup", "5 epochs", "5 epochs"),
    ("schedule.boundaries", "(1,'2 steps')", (1, "2 steps")),
    ("precision.loss_scale", "128", 128),
    ("precision.loss_scale", "dynamic", "dynamic"),
    ("wandb", "None", None),  # unset by default; a text elsewhere
    ("data.num_classes", "None", None),
    ("trainable", "None", "None"),
]


@pytest.mark.parametrize(("path", "text", "value"), SPELLINGS)
def test_override_means_the_same_in_every_place(path, text, value):
    places = (
        [f"--config=digits:fp16,{path}={text}"],
        ["--config=digits:fp16", f"--config.{path}={text}"],
        ["--config=digits:fp16", f"--config.{path}", text],
    )
    factors = ["--config.schedule.factors=(0.1,0.01)"] if path == "schedule.boundaries" else []
    for arguments in places:
        assert base.flatten(parse_flags([*arguments, *factors]).config)[path] == value


@pytest.mark.parametrize("name", ["adamw", "muon", "lars", "sgd"])
def test_another_optimizer_brings_its_defaults(name):
    """Keys that the user sets win in any order and place; the rate of a recipe was for its own optimizer."""
    rate, recipe = "optimizer.learning_rate", base.flatten(base.load_config("digits:fp16"))
    places = (
        [f"--config=digits:fp16,optimizer={name},{rate}=3e-3"],
        [f"--config=digits:fp16,{rate}=3e-3", f"--config.optimizer.name={name}"],
        ["--config=digits:fp16", f"--config.{rate}=3e-3", "--config.optimizer.name", name],
    )
    found = [base.flatten(parse_flags(place).config) for place in places]
    found.append(base.flatten(base.with_keys(base.load_config("digits:fp16"), {rate: 3e-3, "optimizer": name})))
    for config in (base.load_config("digits:fp16"), copy.deepcopy(base.load_config("digits:fp16"))):
        config.optimizer.learning_rate = 3e-3
        config.optimizer.name = name
        found.append(base.flatten(config))
    assert found == found[:1] * 6
    own = {} if name == "sgd" else base.keys.optimizer_defaults(name)
    assert found[0] == recipe | {f"optimizer.{key}": value for key, value in own.items()} | {
        "optimizer.name": name,
        rate: 3e-3,
    }
    experiment = train.plan(parse_flags([f"--config=digits:fp16,optimizer={name}"]).config).experiment
    assert float(experiment.learning_rate(44)) == np.float32(own.get("learning_rate", 0.05))


@pytest.mark.parametrize("set_first", ["learning_rate", "name"])
def test_file_that_names_an_optimizer_sets_what_differs_from_its_defaults(set_first):
    config = base.defaults()
    for key in sorted(("learning_rate", "name"), key=lambda key: key != set_first):
        config.optimizer[key] = {"learning_rate": 0.1, "name": "lars"}[key]
    section = base.finish(config, "fp32", {}).optimizer
    assert section.to_dict() == base.defaults().optimizer.to_dict() | base.keys.optimizer_defaults("lars") | {
        "name": "lars",
        "learning_rate": 0.1,  # the value of a fresh config, but set
    }
    section.name = "adamw"  # the file's rate was for lars
    assert (section.learning_rate, section.weight_decay, section.lr_reference_batch) == (1e-3, 0.01, 0)


def test_none_unsets_a_key():
    made = base.with_keys(base.load_config("digits:fp16"), {"epochs": None, "steps": 7, "model.kernel_init": None})
    assert (made.epochs, made.steps, made.model.kernel_init) == (None, 7, "he_normal")


def test_recorded_config_of_another_version_has_the_defaults_of_its_time():
    """Not those of the optimizer, which came later."""
    flat = base.flatten(base.load_config("digits:fp16,optimizer=adamw"))
    del flat["optimizer.weight_decay"]
    assert base.unflatten(flat).optimizer.weight_decay == 1e-4


def test_switch_needs_no_value():
    assert parse_flags(["--config=digits:fp16", "--config.data.flip", "--clean"]).config.data.flip is True


NUMBERS = [
    ("batch_size", np.int64(16), 16),
    ("batch_size", np.asarray(16, np.uint8), 16),
    ("steps", jnp.int32(5), 5),  # not set by default
    ("optimizer.learning_rate", jnp.float32(0.25), 0.25),
    ("optimizer.learning_rate", np.int32(1), 1.0),
    ("optimizer.learning_rate", jnp.bfloat16(0.25), 0.25),
    ("optimizer.learning_rate", np.longdouble(0.25), 0.25),
    ("data.flip", np.bool_(False), False),
    ("schedule.warmup", np.float64(1.5), 1.5),
    ("precision.loss_scale", np.float16(128), 128.0),
    ("model.name", np.str_("resnet18"), "resnet18"),
    ("schedule.boundaries", (np.int64(3), "9 steps"), (3, "9 steps")),
    ("schedule.factors", jnp.asarray([0.5, 0.25]), (0.5, 0.25)),
]


@pytest.mark.parametrize(("path", "given", "value"), NUMBERS)
def test_numbers_of_numpy_and_jax_are_plain_numbers(path, given, value):
    by_attribute = base.defaults()
    *sections, name = path.split(".")
    setattr(by_attribute[sections[0]] if sections else by_attribute, name, given)
    for config in (base.unflatten({path: given}), by_attribute, copy.deepcopy(by_attribute)):
        found = base.flatten(config)[path]
        assert found == value and json.dumps(found) == json.dumps(value)
    # As Python's numbers: no fraction for an int, no number for a switch, no table for a tuple.
    for wrong, other in (("batch_size", np.float64(16)), ("data.flip", np.int64(1)), ("schedule.factors", np.eye(2))):
        assert f"config.{wrong} is" in made.message(lambda: base.validate(base.unflatten({wrong: other})))  # noqa: B023
