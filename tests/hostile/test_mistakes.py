"""Mistakes in a command, and what is installed, which end in one line."""

import io
import os
import tomllib

import numpy as np
import pytest
from PIL import Image

import mixedres
from mixedres import main, replay
from mixedres._internal.cli import compilation
from mixedres._internal.errors import ConfigError
from mixedres.config import flags
from mixedres.data.images import decoding
from mixedres.train.distributed.startup import is_here
from tests import ROOT
from tests.hostile.commands import assert_one_line, run, run_here


def test_values_of_a_wrong_type_are_refused(place):
    for value in ("x", "(1, 'x')", "(None,)", "((1,),)"):
        outcome = run_here(main.main, "--config=digits:fp32", f"--config.schedule.factors={value}")
        assert_one_line(outcome, 2, "config.schedule.factors")


def test_home_of_an_unknown_user_is_refused(place):
    words = "there is no user 'nosuchuser'"
    assert_one_line(run_here(main.main, "--config=digits:fp32", "--workdir=~nosuchuser/x"), 2, words)
    assert_one_line(run_here(replay.main, "~nosuchuser/x"), 2, words)
    outcome = run_here(main.main, "--config=folder:fp32", "--config.data.dir=~nosuchuser/x", f"--workdir={place}/run")
    assert_one_line(outcome, 2, words)
    with pytest.raises(ConfigError, match=words):
        compilation._directory("~nosuchuser/x")
    assert list(place.iterdir()) == []


def test_too_long_file_names_are_refused(place):
    outcome = run_here(main.main, "--config=digits:fp32", f"--workdir={place}/{'x' * 300}")
    assert_one_line(outcome, 2, "cannot be used (File name too long)")


def test_image_sizes_out_of_range_are_refused(place):
    outcome = run_here(main.main, "--config=imagenet:fp32", "--config.data.image_size=200000", f"--workdir={place}/run")
    assert_one_line(outcome, 2, "config.data.image_size is 200000; it must be > 0 and <= 8192")
    assert list(place.iterdir()) == []


@pytest.mark.slow
def test_missing_platform_is_one_line(place):
    env = {"JAX_PLATFORMS": "cuda"}
    assert_one_line(run("mixedres.main", "--config=digits:fp32", f"--workdir={place}/run", env=env), 2, "JAX_PLATFORMS")
    assert list(place.iterdir()) == []


@pytest.mark.slow
def test_commands_run_with_warnings_as_errors(place):
    options = (
        "--config=digits:fp32,model=cifar_resnet8,steps=2",
        "--config.data.image_size=8",
        f"--workdir={place}/run",
    )
    assert run("mixedres.main", *options, env={"PYTHONWARNINGS": "error"}).status == 0


def test_config_file_that_exits_is_one_line(place):
    (place / "config.py").write_text("import sys\nsys.exit(0)\n")
    assert_one_line(run_here(main.main, f"--config={place}/config.py"), 2, "ends the program")


def test_config_file_that_is_a_pipe_is_refused(place):
    os.mkfifo(place / "config.py")
    assert_one_line(run_here(main.main, f"--config={place}/config.py"), 2, "not a regular file")


def test_process_0_listens_on_its_own_address(place):
    assert is_here("127.0.0.1:7831") and is_here("localhost:7831") and is_here("[::1]:7831")
    assert not is_here("192.0.2.1:7831")  # an address for documentation (RFC 5737)


def test_wheel_holds_only_the_package(place):
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"only-include": ["configs", "mixedres"], "sources": {"configs": "mixedres/config/recipes"}}
    package = ROOT / "mixedres"
    assert mixedres.__path__ == [str(package)] and (package / "py.typed").exists()
    assert flags.RECIPES[0] == package / "config" / "recipes" and "digits" in flags.recipes()


def test_image_of_floating_point_numbers_is_refused(place):
    file = io.BytesIO()
    Image.fromarray(np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16)).save(file, "TIFF")
    with pytest.raises(ValueError, match="floating-point numbers"):
        decoding.decode_image(file.getvalue(), decoding.read_header(file.getvalue()))
