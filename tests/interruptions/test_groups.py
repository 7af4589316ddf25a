"""Runs of several processes with a fault in one of them; docs/scale-out.md sums up what was measured."""

import json
import subprocess
import sys

import pytest

from tests import ROOT
from tests.interruptions import groups

pytestmark = pytest.mark.nightly


def rows(part):
    command = [sys.executable, "-W", "ignore", "-m", "tests.interruptions.groups", part]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("part", groups.PARTS)
def test_one_fault_costs_nothing_but_time(part):
    for row in rows(part):
        assert row["same"] and row["named"], row
        assert not any(row.get("again", ())), row
        lost = {"kill": {4, 2, -9}, "flip": {1}}.get(row["action"], {0})
        assert set(row["statuses"]) <= lost, row
