"""The environment of every test: eight CPU devices, rank promotion as an error, a compilation cache of this session."""

import atexit
import gc
import os
import shutil
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
# Most of the time of the tests goes into LLVM's optimizations of programs that run for milliseconds.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)
if "PYTEST_XDIST_WORKER" not in os.environ:
    # Whole runs and their continuations compile the same programs; the processes of the session share them.
    cache = tempfile.mkdtemp(prefix="mixedres-tests-")
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"

import jax
import psutil
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True, scope="module")
def bounded_memory():
    """Drops compiled programs after a module that left a worker large; most of them no other module uses."""
    yield
    if psutil.Process().memory_info().rss > 900e6:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A directory with images in ``images/val`` and a run on them in ``run``; not to be changed."""
    from tests.train import run_cases

    return run_cases.image_run(tmp_path_factory)
