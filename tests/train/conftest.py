"""Fixtures of the tests of runs."""

import gc

import pytest

from tests.train import run_cases, step_cases


@pytest.fixture(scope="module")
def one_block():
    """Every network of the module is stem, one block and head."""
    with pytest.MonkeyPatch.context() as patch:
        run_cases.shrink(patch, blocks=1)
        yield


@pytest.fixture(scope="module", autouse=True)
def programs_of_one_module(request):
    """Frees what a module compiled: the programs of all of them take gigabytes."""
    yield
    for cached in (step_cases.compiled, step_cases.network, *vars(request.module).values()):
        getattr(cached, "cache_clear", lambda: None)()
    gc.collect()
