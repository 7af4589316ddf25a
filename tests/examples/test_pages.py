"""The pages that a reader types from the first line to the last, each in a process and a directory of its own."""

import json
import os
import subprocess
import sys

import pytest

from tests import ROOT


@pytest.mark.parametrize(
    "page",
    [
        pytest.param("python", marks=pytest.mark.slow),
        # .ci/run reads this page with an installed wheel.
        pytest.param("photographs", marks=pytest.mark.nightly),
    ],
)
def test_page_runs_from_its_first_line_to_its_last(page, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # one device
    command = [sys.executable, str(ROOT / "tests" / "pages.py"), str(ROOT / "docs" / f"{page}.md")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert {"python": "runs/noisy", "photographs": "exported"}[page] in done.stdout
    if page == "photographs":
        summary = json.loads((tmp_path / "runs" / "photos" / "summary.json").read_text())
        assert summary["eval"]["top1"] > 0.85 and summary["unreadable_images"]["count"] == 0
