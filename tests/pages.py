"""Runs a page of the docs as a reader would: python tests/pages.py docs/photographs.md, in an empty directory.

Blocks of Python share one namespace. Blocks of `sh` run in bash, with this Python's scripts first on the PATH; lines
that begin with `pip install` are left out, because the packages are installed.
"""

import linecache
import os
import pathlib
import re
import subprocess
import sys
import time

BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def main(page: str) -> None:
    """Runs the blocks of a page in order; the first that fails ends the program."""
    names: dict[str, object] = {"__name__": "__page__"}
    scripts = os.path.dirname(sys.executable)
    environment = {**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}"}
    for number, (language, text) in enumerate(BLOCK.findall(pathlib.Path(page).read_text())):
        began = time.monotonic()
        print(f"\n>> {text.splitlines()[0]}", flush=True)
        if language == "python":
            name = f"block_{number}.py"
            linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)  # for tracebacks and Grain
            exec(compile(text, name, "exec"), names)
        else:
            lines = [line for line in text.splitlines() if not line.startswith("pip install")]
            subprocess.run(["bash", "-e", "-c", "\n".join(lines)], env=environment, check=True)
        print(f"<< {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
