"""The command for GPUs: its parts in their tiny form, what is kept when one fails, its page and its mistakes."""

import json
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from experiments import gpu
from experiments.on_gpu import kernels, page
from tests import ROOT


@pytest.mark.nightly
def test_tiny_form_runs_every_part(tmp_path):
    given = [sys.executable, "-m", "experiments.gpu", "--device=cpu", "--name=try", f"--out={tmp_path}"]
    done = subprocess.run(given, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "gpu_try.json").read_text())
    names = [part.name for part in gpu.parts(gpu.parse(["--device=cpu"]))]
    assert list(document["parts"]) == names and not document["failed"]
    found = document["parts"]
    assert all(row["passed"] for row in found["numerics"]["rows"]) and len(found["numerics"]["rows"]) == 13
    names = {"fp32 plain", "fp32 fused", "fp16 plain", "fp16 fused"}
    assert {row["name"] for row in found["steps_8"]["rows"]} == names
    assert all(row["ms"] > 0 for row in found["costs"]["rows"]) and not found["costs"]["failed"]
    traced = found["kernels"]["presets"]["fp16"]
    rows = traced["kernels"]
    times = [row["ms"] for row in rows]
    assert len(rows) == 10 and times == sorted(times, reverse=True) and all(row["bytes"] > 0 for row in rows)
    assert sum(traced["ms_by_kind"].values()) == pytest.approx(traced["ms_of_all_kernels"])
    assert list((tmp_path / "traces" / "fp16").rglob("*.xplane.pb")) and found["digits"]["examples"] == 360
    text = (tmp_path / "gpu_try.md").read_text()
    for heading in ("Steps of", "Numerics", "Beside other libraries", "Costs", "Kernels", "Fed with JPEGs", "Digits"):
        assert f"## {heading}" in text
    assert "What did not run" not in text
    page.write(document | {"parts": found | {"steps_16": found["steps_8"]}}, tmp_path / "gpu_two")
    for picture in ("try_kernels", "two_steps"):
        assert (tmp_path / f"gpu_{picture}.png").stat().st_size > 3_000


def program(tmp_path, name, text):
    """A part whose process runs `text`, with `out` as the file of its result."""
    (tmp_path / "made").mkdir(exist_ok=True)
    (tmp_path / "made" / "__init__.py").touch()
    head = "import json, pathlib, sys, time\nout = pathlib.Path(sys.argv[-1].removeprefix('--name='))\n"
    (tmp_path / "made" / f"{name}.py").write_text(head + text)

    class Made(gpu.Part):
        def command(self, out, seconds):
            return [*super().command(out, seconds)[:-1], f"--name={out / self.file}"]

    return Made(name, 1, "made", f"made.{name}")


def test_part_that_fails_hangs_or_dies_keeps_the_others(tmp_path, monkeypatch, capsys):
    good = "out.write_text(json.dumps({'rows': [%s]}))\n"
    parts = [
        program(tmp_path, "first", good % 1),
        program(tmp_path, "raises", "raise ValueError('no such kernel')\n"),
        program(tmp_path, "hangs", good % 2 + "time.sleep(100)\n"),
        program(tmp_path, "dies", "import os; os.kill(os.getpid(), 9)\n"),
        program(tmp_path, "last", good % 3),
    ]
    monkeypatch.setattr(gpu, "MINUTES", 5)
    report = gpu.Report(tmp_path / "gpu_made.json", keep=False)
    began = time.monotonic()
    # Each has a minute of five: of a tenth of a minute in all, 1.2 s and what is left over.
    gpu.run(parts, report, tmp_path, 0.1, {**os.environ, "PYTHONPATH": str(tmp_path)})
    assert time.monotonic() - began < 20
    document = json.loads((tmp_path / "gpu_made.json").read_text())
    rows = {name: result["rows"] for name, result in document["parts"].items()}
    assert rows == {"first": [1], "hangs": [2], "last": [3]}
    assert "ValueError: no such kernel" in document["failed"]["raises"]
    assert "cut off after" in document["failed"]["hangs"] and "exit status -9" in document["failed"]["dies"]
    gpu.Report(tmp_path / "gpu_made.json", keep=True).add("raises", {"rows": [4]}, "")
    kept = json.loads((tmp_path / "gpu_made.json").read_text())
    assert set(kept["parts"]) == {"first", "hangs", "last", "raises"} and set(kept["failed"]) == {"hangs", "dies"}


def test_damaged_result_is_not_overwritten(tmp_path):
    (tmp_path / "gpu_made.json").write_text("{")
    with pytest.raises(gpu.ConfigError, match="move it away"):
        gpu.Report(tmp_path / "gpu_made.json", keep=True)


def test_kernels_of_a_trace_are_joined_with_their_bytes():
    text = jax.jit(lambda x: jnp.tanh(x @ x).sum()).lower(jnp.ones((64, 64))).compile().as_text()
    names = [kernel.name for kernel in kernels.hlo.kernels(text)]
    ran = {name: kernels.Traced(10, 1e6 * (index + 1)) for index, name in enumerate(names)}
    found = kernels.largest(ran | {"inner.1": kernels.Traced(1, 1e9)}, text, 10, bandwidth=1e9)
    assert [row["name"] for row in found["kernels"]] == names[::-1][:10]
    first = found["kernels"][0]
    assert first["ms"] == pytest.approx(0.1 * len(names))
    assert first["bandwidth_share"] == pytest.approx(first["bytes"] / (first["ms"] / 1e3) / 1e9)


def document(**ratios):
    """Results in which fused norms are so many times as fast in each preset, at two batch sizes."""
    rows = [
        {"preset": preset, "norms": "fused", "speedup": {"plain": {"ratio": ratio}}} for preset, ratio in ratios.items()
    ]
    plain = [{"preset": preset, "norms": "plain", "speedup": {}} for preset in ratios]
    parts = {"steps_256": {"rows": plain + rows}, "steps_32": {"rows": rows}, "costs": {"rows": [{"batch": 1}]}}
    return {"device": {"kind": "NVIDIA H200"}, "parts": parts}


def test_auto_learns_what_was_measured(tmp_path):
    table = tmp_path / "table.json"
    table.write_text('{"cpu": ["float32"]}')
    assert page.remember(document(bf16=1.2, fp16=1.1, fp16_static=0.9, fp32=0.98, tf32=1.3), table) == table
    # float16 is slower by a tenth in one preset; float32 by 2 % in one, and faster on average.
    assert json.loads(table.read_text()) == {"cpu": ["float32"], "NVIDIA H200": ["bfloat16", "float32"]}
    before = table.read_bytes()
    assert page.remember({"device": {"kind": "x"}, "parts": {}}, table) is None and table.read_bytes() == before
