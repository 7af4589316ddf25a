"""Platforms, addresses and warnings that are not as a command expects them."""

import pytest

from mixedres.hosts.startup import is_here
from tests.hostile.commands import assert_one_line, run


@pytest.mark.slow
def test_missing_platform_is_one_line(place):
    env = {"JAX_PLATFORMS": "cuda"}
    assert_one_line(run("mixedres.main", "--config=digits:fp32", f"--workdir={place}/run", env=env), 2, "JAX_PLATFORMS")
    assert list(place.iterdir()) == []


@pytest.mark.slow
def test_commands_run_with_warnings_as_errors(place):
    options = ("--config=digits:fp32,model=cifar_resnet8,steps=2", "--config.data.image_size=8")
    assert run("mixedres.main", *options, f"--workdir={place}/run", env={"PYTHONWARNINGS": "error"}).returncode == 0


def test_process_0_listens_on_its_own_address(place):
    assert is_here("127.0.0.1:7831") and is_here("localhost:7831") and is_here("[::1]:7831")
    assert not is_here("192.0.2.1:7831")  # an address for documentation (RFC 5737)
