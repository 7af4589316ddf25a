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


for page in ("README.md", "docs/autocast.md", "docs/numerics.md"):
    names: dict = {}
    for code in blocks(page):
        exec(compile(code, "docs", "exec"), names)

assert not names["report"].is_fine and names["finding"].origin is not None  # of docs/numerics.md
assert "16" in str(precision.get("fp16").policy) and amp.LEVELS and numerics.counting.exponents

commands = {
    "main": ["--config=digits:fp16"],
    # A path that does not exist would be the first mistake.
    "predict": [f"--from={root}/README.md", f"{root}/README.md"],
    "export": [f"--from={root}/README.md", "--to=there"],
    "doctor": ["--config=digits:fp16"],
    "replay": ["nowhere"],
    "photographs.prepare": [f"--from={root}/configs", "--to=there", "--short_side=64"],
}
for name, arguments in commands.items():
    done = subprocess.run([sys.executable, "-m", f"mixedres.{name}", *arguments], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, (name, done)
    assert "whl[train]'" in done.stderr, (name, done.stderr)
    print(done.stderr, end="")
    shown = subprocess.run([sys.executable, "-m", f"mixedres.{name}", "--help"], capture_output=True, text=True)
    assert shown.returncode == 0 or "pip install" in shown.stderr, (name, shown)
assert not os.path.exists("there")
