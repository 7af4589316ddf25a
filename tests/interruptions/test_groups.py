"""Runs of several processes with a fault in one of them; docs/scale-out.md sums up what was measured."""

import json
import subprocess
import sys

import pytest

from tests import ROOT
from tests.interruptions import groups

pytestmark = pytest.mark.nightly


def rows(part, place):
    """The rows of a part, made by a process of its own, which ends what it has started."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.interruptions.groups", str(place / "rows.jsonl"), part]
    subprocess.run(command, cwd=ROOT, check=True)
    return [json.loads(line) for line in (place / "rows.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("part", ["two", "more", "late"])
def test_one_fault_costs_nothing_but_time(part, tmp_path):
    for row in rows(part, tmp_path):
        assert row["same"] and row["named"], row
        assert not any(row.get("again", ())), row
        lost = {"kill": {4, 2, -9}, "flip": {1}}.get(row["action"], {0})
        assert set(row["statuses"]) <= lost, row


@pytest.mark.parametrize("part", ["mistakes", "strangers"])
def test_processes_that_do_not_fit_together_write_nothing(part, tmp_path):
    for row in rows(part, tmp_path):
        is_extra = row["mistake"] == "process 2 of two"
        assert row["statuses"][-1] == 2 and (is_extra or set(row["statuses"]) == {2}), row
        assert row["line"].startswith("mixedres: ") and row["has_written"] == is_extra, row


def test_run_continues_with_fewer_processes(tmp_path):
    (row,) = rows("elastic", tmp_path)
    assert row["steps"] == groups.STEPS and row["worst_loss"] < 1e-5, row


def test_killed_run_ends_with_the_same_bits(tmp_path):
    *killed, last = rows("kills", tmp_path)
    assert last["same"] and last["kills"] == 60, last
    assert all(set(row["statuses"]) <= {4, -9, 2} for row in killed), killed
