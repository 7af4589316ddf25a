"""Fixtures of the tests of runs."""

import gc

import pytest

from tests.train import step_cases


@pytest.fixture(scope="module", autouse=True)
def programs_of_one_module(request):
    """Frees what a module compiled: the programs of all of them take gigabytes."""
    yield
    for cached in (step_cases.compiled, step_cases.network, *vars(request.module).values()):
        getattr(cached, "cache_clear", lambda: None)()
    gc.collect()
