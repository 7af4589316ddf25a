"""Writes the live pages of the site, docs/live/*.html: reports of the library, each one file that works offline.

PYTHONPATH=. python docs/live.py  # ten minutes on two cores, most for the sweep; --only=doctor,explain makes some

The pages are committed, because making them takes longer than a build of the site. docs/numerics.md, docs/autocast.md
and docs/experiments.md show the programs that are examined here. Pictures of two pages go to docs/images; they need
Chromium (Debian's package `chromium`).
"""

import argparse
import contextlib
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp

from mixedres import numerics

ROOT = pathlib.Path(__file__).parent.parent
LIVE = ROOT / "docs" / "live"


def run(*arguments: str, cwd: pathlib.Path) -> None:
    """Runs a command of the checkout in another directory."""
    subprocess.run([sys.executable, "-m", *arguments], cwd=cwd, check=True, env={"PYTHONPATH": str(ROOT)})


def page(name: str) -> dict[str, Any]:
    """Runs the Python blocks of a page in order, and returns their names."""
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / name).read_text(), re.DOTALL):
        exec(compile(code, "example.py", "exec"), names)
    return names


def picture(page: pathlib.Path, name: str, width: int, height: int, *, dark: bool = False) -> None:
    """Writes what a browser shows of the beginning of a page to docs/images."""
    options = ["--headless", "--no-sandbox", "--hide-scrollbars"]
    options += [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    options += [f"--window-size={width},{height}", f"--screenshot={ROOT / 'docs' / 'images' / name}"]
    subprocess.run(["chromium", *options, page.resolve().as_uri()], check=True, stderr=subprocess.DEVNULL)


def doctor(work: pathlib.Path) -> None:
    """A healthy network, and a network that float16 harms."""
    run("mixedres.doctor", f"--config={ROOT}/configs/digits.py:fp16", "--steps=0,100", "--compare=fp16,bf16", cwd=work)
    shutil.copy(work / "doctor.html", LIVE / "doctor_healthy.html")
    spec = importlib.util.spec_from_file_location("layer_scale", ROOT / "examples" / "layer_scale.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    params = example.Network(jnp.float32).init(jax.random.key(0), example.x)["params"]
    loss, title = example.loss_in(jnp.float32), "Three blocks behind layer scale"
    report = numerics.examine(loss, params, example.x, example.labels, title=title)
    report.to_html(LIVE / "doctor_sick.html")
    picture(LIVE / "doctor_sick.html", "doctor.png", 1000, 830)


def explain(work: pathlib.Path) -> None:
    """The worked example of docs/autocast.md."""
    page("autocast.md")["report"].to_html(LIVE / "explain.html")


def library(work: pathlib.Path) -> None:
    """The notebook of docs/library.md: its text and its blocks, with what they print."""
    import nbclient
    import nbformat.v4 as notebooks

    text = re.sub(r"```text\n.*?```\n", "", (ROOT / "docs" / "library.md").read_text(), flags=re.DOTALL)
    text = re.sub(r"\]\((?=[\w/]+\.md)", "](../docs/", text)
    cells = []
    for number, part in enumerate(re.split(r"```python\n(.*?)```", text, flags=re.DOTALL)):
        make = notebooks.new_code_cell if number % 2 else notebooks.new_markdown_cell
        cells.append(make(part.strip(), id=f"cell-{number}"))
    notebook = notebooks.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, record_timing=False).execute()
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    (ROOT / "examples" / "your_own_program.ipynb").write_text(notebooks.writes(notebook) + "\n")


def compare(work: pathlib.Path) -> None:
    """The pairwise distances of docs/numerics.md."""
    page("numerics.md")["report"].to_html(LIVE / "compare.html")


def sweep(work: pathlib.Path) -> None:
    """Three presets with three seeds on the digits."""
    given = f"--sweep={ROOT}/experiments/sweeps/precision.py"
    run("experiments.sweep", given, "--only=seed=[012],(fp32|bf16|fp16)$", "--jobs=2", "--out=sweep", cwd=work)
    run("experiments.report", "sweep", cwd=work)
    shutil.copy(work / "sweep" / "report.html", LIVE / "sweep.html")


def photographs(work: pathlib.Path) -> None:
    """The errors and the curve of docs/photographs.md, and a page of predictions."""
    import skimage.data
    from PIL import Image

    command = [sys.executable, ROOT / "tests" / "pages.py", ROOT / "docs" / "photographs.md"]
    subprocess.run(command, cwd=work, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    run("mixedres.main", "--mode=eval", "--workdir=runs/photos", "--config.data.dir=photos", cwd=work)  # not @best
    shutil.copy(work / "runs" / "photos" / "errors.html", LIVE / "errors.html")
    shutil.copy(work / "curve.png", ROOT / "docs" / "images" / "photographs_curve.png")
    # A whole photograph, and a gray copy, which a network that learned colors mistakes: the error of the picture.
    folder = work / "whole" / "cat"
    folder.mkdir(parents=True)
    for kind, mode in (("color", "RGB"), ("gray", "L")):
        Image.fromarray(skimage.data.chelsea()).convert(mode).save(folder / f"{kind}.jpg")
    run("mixedres.predict", "--from=runs/photos@best", "whole", "--out=sheet.html", cwd=work)
    picture(work / "sheet.html", "sheet.png", 720, 530)
    picture(work / "sheet.html", "sheet_dark.png", 720, 530, dark=True)  # docs/extra.css shows it in dark mode


def main() -> None:
    """Makes all pages, or those of --only."""
    makers = {maker.__name__: maker for maker in (doctor, explain, compare, library, sweep, photographs)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(makers), help="pages to make, with commas between them")
    LIVE.mkdir(exist_ok=True)
    chosen = parser.parse_args().only.split(",")
    if unknown := sorted(set(chosen) - makers.keys()):
        parser.error(f"--only={unknown[0]} is no page; name some of {', '.join(makers)}")
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            makers[name](pathlib.Path(folder))
    for page in sorted(LIVE.glob("*.html")):
        print(f"{page.stat().st_size / 1e3:6.0f} kB  {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
