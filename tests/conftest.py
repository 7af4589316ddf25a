"""The environment of the tests: eight CPU devices, rank promotion as an error, a compilation cache of all sessions."""

import atexit
import gc
import importlib.util
import os
import pathlib
import shutil
import signal
import sys
import tempfile

import pytest

# The tests of amp, precision and numerics run with the base install and pytest alone.
ALL_PACKAGES = all(importlib.util.find_spec(name) for name in ("hypothesis", "psutil", "xdist"))
if ALL_PACKAGES:
    import hypothesis
    import psutil

    hypothesis.settings.register_profile("mixedres", derandomize=True, database=None, deadline=None)
    hypothesis.settings.load_profile("mixedres")
# A shell's `&`, nohup and some CI runners start pytest with SIGINT ignored, and every child of it inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Many containers set it. Each process would rewrite the assertions of all files anew, which takes 12 CPU seconds.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
gc.set_threshold(200_000, 20, 100)  # what imports make stays
os.environ["JAX_PLATFORMS"] = "cpu"
# Most of the time of the tests goes into LLVM's optimizations of programs that run for milliseconds.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)

CACHE_LIMIT = 500e6  # bytes; a session compiles 60 MB, and every change of a program leaves the old one behind
# What modules of tests/amp, tests/precision and tests/numerics need besides.
NEEDS = {
    "flax": ("amp/test_flax_modules", "numerics/test_networks"),
    "hypothesis": ("amp/test_law", "precision/test_rule"),
}
collect_ignore = [
    f"{module}.py" for package, modules in NEEDS.items() if not importlib.util.find_spec(package) for module in modules
]


def pytest_addoption(parser):
    """Takes the options of pytest-xdist from pyproject.toml where it is not installed: one process runs all tests."""
    if importlib.util.find_spec("xdist") is None:
        for name in ("--numprocesses", "--dist"):
            parser.addoption(name)


def pytest_configure(config):
    """Shares compiled programs between processes and sessions."""
    if not hasattr(config, "workerinput"):
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_compilation_cache(config))
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    import jax  # reads the environment once

    jax.config.update("jax_numpy_rank_promotion", "raise")
    # The environment is too late where the conftest of a subfolder has imported JAX already.
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def _compilation_cache(config):
    """Returns a directory in .pytest_cache, or one of this session alone if that cannot be written."""
    try:
        directory = config.cache.mkdir("programs")  # AttributeError with -p no:cacheprovider
        if sum(file.stat().st_size for file in directory.iterdir()) > CACHE_LIMIT:
            shutil.rmtree(directory)
            directory.mkdir()
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except (AttributeError, OSError):
        directory = pathlib.Path(tempfile.mkdtemp(prefix="mixedres-tests-"))
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        return directory


def pytest_make_parametrize_id(val):
    """Shows tuples, lists and dictionaries of plain values in the names of tests, where pytest would number them."""
    if not isinstance(val, tuple | list | dict) or not _is_plain(val):
        return None
    if isinstance(val, dict):
        return ",".join(f"{key}={value}" for key, value in val.items())[:80] or "none"
    return str(val)[:80]


def _is_plain(value):
    if isinstance(value, dict):
        value = (*value.keys(), *value.values())
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | bool | int | float)


def pytest_collection_finish():
    """Collects garbage more rarely: what the imports made stays, and tests leave little."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.fixture(autouse=True, scope="session")
def temporary_files(tmp_path_factory):
    """Lets what libraries leave among temporary files go with the directories of the tests."""
    directory = tmp_path_factory.getbasetemp() / "t"  # short: sockets in it have at most 107 characters
    directory.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(directory))
        patch.setattr(tempfile, "tempdir", str(directory))
        yield


@pytest.fixture(autouse=True, scope="module")
def bounded_memory(request):
    """Drops what a module compiled if it left a worker large; most programs no other module uses."""
    yield
    if ALL_PACKAGES and psutil.Process().memory_info().rss > 900e6:
        import jax

        for cached in vars(request.module).values():
            getattr(cached, "cache_clear", lambda: None)()
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A directory with ``images/val`` and a run on them in ``run``; not to be changed."""
    from tests.train import run_cases

    directory = tmp_path_factory.getbasetemp() / "image_run"
    run_cases.image_run(directory)
    return directory


@pytest.fixture(scope="module")
def small_network():
    """Every network of the module is stem and head; for tests whose subject is the run."""
    from tests.train import run_cases

    with pytest.MonkeyPatch.context() as patch:
        run_cases.shrink(patch)
        yield
