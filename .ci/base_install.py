"""Checks an installation without extras: few packages, the tools for other programs, and commands that ask for more.

python .ci/base_install.py CHECKOUT, in an environment with `pip install mixedres` alone.
"""

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys

root = pathlib.Path(sys.argv[1])
names = sorted({found.metadata["Name"].lower() for found in importlib.metadata.distributions()} - {"pip", "setuptools"})
print(len(names), "packages:", *names)
assert len(names) <= 10

from mixedres import amp, numerics, precision  # noqa: E402


def blocks(page):
    """The Python examples of a page."""
    return re.findall(r"```python\n(.*?)```", (root / page).read_text(), re.DOTALL)


loop, short = blocks("README.md")
worked, rewritten = blocks("docs/autocast.md")
for code in (loop, f"{worked}\n{short}", rewritten):  # README's short one continues that of the docs
    exec(compile(code, "docs", "exec"), {})

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402


def loss(params, x):
    """A scalar with a tap."""
    return jnp.square(jnp.tanh(numerics.tap(x @ params["w"], "hidden"))).mean()


report = numerics.examine(loss, {"w": jnp.eye(4)}, jnp.ones((2, 4)))
print(report)
report.to_html("report.html")
finding = numerics.first_nonfinite(jax.grad(loss), {"w": jnp.eye(4)}, jnp.full((2, 4), jnp.inf))
assert finding.origin is not None and "16" in str(precision.get("fp16").policy) and amp.LEVELS

commands = {
    "main": ["--config=digits:fp16"],
    # A path that does not exist would be the first mistake.
    "predict": [f"--from={root}/README.md", f"{root}/README.md"],
    "export": [f"--from={root}/README.md", "--to=there"],
    "convert": [f"--from={root}/README.md", "--to=there"],
    "doctor": ["--config=digits:fp16"],
    "replay": ["nowhere"],
    "data.prepare": ["folder", f"--from={root}/configs", "--data_dir=there", "--name=x"],
}
for name, arguments in commands.items():
    done = subprocess.run([sys.executable, "-m", f"mixedres.{name}", *arguments], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, (name, done)
    assert "pip install '.[train]'" in done.stderr, (name, done.stderr)
    print(done.stderr, end="")
    shown = subprocess.run([sys.executable, "-m", f"mixedres.{name}", "--help"], capture_output=True, text=True)
    assert shown.returncode == 0 or "pip install" in shown.stderr, (name, shown)
assert not os.path.exists("there")
