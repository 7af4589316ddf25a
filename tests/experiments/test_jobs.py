"""How the cores of a machine are shared out among runs at a time."""

import os

import pytest

from experiments import jobs


@pytest.mark.parametrize("cores", [1, 2, 3, 8])
@pytest.mark.parametrize("slots", [2, 3, 8])
def test_the_shares_are_equal(monkeypatch, cores, slots):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(10, 10 + cores)))
    shares = [jobs.share_of_cores(slot, slots) for slot in range(slots)]
    used = [core for share in shares for core in share]
    assert set(used) <= set(range(10, 10 + cores)) and len({len(share) for share in shares}) == 1
    if slots <= cores:
        assert len(set(used)) == len(used) == cores // slots * slots
    else:
        assert len(shares[0]) == 1 and max(map(used.count, used)) - min(map(used.count, used)) <= 1


def test_one_run_at_a_time_has_the_machine():
    assert jobs.share_of_cores(0, 1) == ()
