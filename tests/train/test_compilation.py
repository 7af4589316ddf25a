"""Compiled programs on the disk: a second start compiles nothing, and the options of JAX return afterwards."""

import json
import os

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from PIL import Image

from mixedres import main
from mixedres._internal.cli import compilation
from mixedres._internal.cli.compilation import CompilationCounter
from mixedres._internal.errors import ConfigError
from mixedres._internal.processes import SingleProcess
from tests import ROOT, run_command

TINY = (
    f"--config={ROOT}/configs/digits.py:fp16",
    "--config.model.name=cifar_resnet8",
    "--config.data.image_size=8",
    "--config.batch_size=32",
    "--config.num_devices=1",
    "--config.steps=3",
    "--config.log_resources_every=0",
)


@pytest.fixture(autouse=True)
def jax_without_a_cache(tmp_path, monkeypatch):
    """As in a user's process; the session of the tests has one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", before)
    reset_cache()


def compile_one(number):
    """Compiles and runs a program of its own for every `number`."""
    return jax.jit(lambda x: x * number)(np.float32(2.0))


def entries(directory):
    return len(list(directory.glob("*-cache")))


@pytest.mark.slow
def test_second_start_compiles_nothing_and_keeps_every_bit(tmp_path):
    """Nor do an evaluation and a prediction."""
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "image.png")
    found = {}
    for name in ("first", "second"):
        jax.clear_caches()
        command = ["mixedres", *TINY, f"--workdir={tmp_path / name}"]
        with CompilationCounter() as programs:
            assert main.main(command) == 0 and main.main([*command, "--mode=eval"]) == 0
            assert run_command("predict", f"--from={tmp_path / name}", str(tmp_path / "image.png")) == 0
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        found[name] = entries(tmp_path / compilation.NAME), programs.from_cache, summary
    (written, _, first), (same, cached, second) = found.values()
    assert cached >= same == written > first["train"]["programs"]["compiled"] >= 4
    assert second["train"]["programs"]["compiled"] == 0
    assert second["fingerprint"] == first["fingerprint"] and second["eval"] == first["eval"]


def test_programs_are_cached_inside_alone_and_the_settings_return(tmp_path):
    before = dict(jax.config.values)
    with compilation.compilation_cache("auto"):  # nobody else makes it first
        assert (tmp_path / compilation.NAME).stat().st_mode & 0o777 == 0o700
    assert not (tmp_path / compilation.NAME).exists()  # a mistake before the first program leaves nothing
    with pytest.raises(KeyError), compilation.compilation_cache("auto"):
        compile_one(3.0)
        assert entries(tmp_path / compilation.NAME) == 1
        raise KeyError
    assert jax.config.values == before
    compile_one(5.0)
    assert entries(tmp_path / compilation.NAME) == 1
    with compilation.compilation_cache(str(tmp_path / "elsewhere")):
        compile_one(7.0)
    assert entries(tmp_path / "elsewhere") == 1 and entries(tmp_path / compilation.NAME) == 1


def test_moved_cache_is_reused(tmp_path, monkeypatch):
    for run in ("here", "there"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / run))
        with compilation.compilation_cache("auto"), CompilationCounter() as programs:
            compile_one(19.0)
        assert programs.from_cache == (run == "there")
        if run == "here":
            (tmp_path / "here").rename(tmp_path / "there")


@pytest.mark.parametrize(("setting", "jax_has_it_on"), [("none", True), ("auto", False)])
def test_disabled_cache_stays_off(setting, jax_has_it_on, tmp_path):
    jax.config.update("jax_enable_compilation_cache", jax_has_it_on)
    with compilation.compilation_cache(setting):
        compile_one(11.0)
    assert list(tmp_path.iterdir()) == []


def test_programs_used_the_longest_ago_are_removed(tmp_path):
    for used, name in enumerate("bca"):
        (tmp_path / name).write_bytes(b"x" * 100)
        os.utime(tmp_path / name, (used, 0))
    compilation.remove_oldest(tmp_path, 250)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c"]


def test_program_that_was_not_written_whole_is_written_again(tmp_path, recwarn):
    from_cache, sizes = [], []
    for damage in ("", "", "before", "", "inside", "", ""):
        jax.clear_caches()
        written = list((tmp_path / compilation.NAME).glob("*-cache"))
        if damage == "before":
            os.truncate(written[0], 100)
        with compilation.compilation_cache("auto"), CompilationCounter() as programs:
            if damage == "inside":  # by another process, after the look at the directory
                os.truncate(written[0], 100)
            compile_one(23.0)
        from_cache.append(programs.from_cache)
        sizes.append(next((tmp_path / compilation.NAME).glob("*-cache")).stat().st_size)
    assert from_cache == [0, 1, 0, 1, 0, 0, 1]
    assert [size > 100 for size in sizes] == [True, True, True, True, False, True, True] and not recwarn.list


def test_cache_set_in_jax_stays(tmp_path, monkeypatch):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    monkeypatch.setattr(compilation, "_set", None)
    for setting in ("auto", "none", str(tmp_path / "named"), "/dev/null/directory"):
        with compilation.compilation_cache(setting):
            assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")


def test_no_write_permission_is_seen_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the tests may run as root, who may write anywhere
    refused = pytest.raises(ConfigError, match=f"compilation_cache={tmp_path}/a/b cannot be written")
    with refused, compilation.compilation_cache(str(tmp_path / "a" / "b")):
        pass
    with compilation.compilation_cache("auto"):  # nobody asked for it by name
        assert jax.config.jax_compilation_cache_dir is None
    assert list(tmp_path.iterdir()) == []


def test_processes_follow_the_decision_of_process_0(tmp_path, monkeypatch):
    monkeypatch.setattr(compilation, "_directory", None)  # they look at no directory
    for decided in (None, str(tmp_path / "decided")):
        other = SingleProcess()
        other.index, other.broadcast = 1, lambda name, value, decided=decided: decided
        with compilation.compilation_cache("auto", other):
            assert jax.config.jax_compilation_cache_dir == decided
