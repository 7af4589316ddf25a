"""The architecture: imports point down, what stands alone stays alone, and files stay readable."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "mixedres"

# Layer of every module of the package; an import may only go to a lower one, or stay in its own package.
LAYERS = {
    "main": 11,
    "replay": 10,
    "train": 10,
    "evaluation": 10,
    "start": 7,
    "summary": 9,
    "loop": 8,
    "setup": 5,
    "progress": 0,
    "sampling": 7,
    "nonfinite": 6,
    "build": 6,
    "convert": 10,
    "predict": 10,
    "export": 10,
    "exported_files": 8,
    "saved_model": 8,
    "network": 7,
    "doctor": 12,
    "checkup": 8,
    "examination": 6,
    "tapped": 4,
    "sheet": 0,
    "initial": 6,
    "trained": 5,
    "arguments": 4,
    "devices": 4,
    "checkpoints": 3,
    "processes": 4,
    "workdir": 4,
    "config": 3,
    "config_keys": 2,
    "step": 3,
    "files": 0,
    "checksums": 1,
    "interrupts": 0,
    "leaves": 0,
    "resources": 0,
    "compilations": 0,
    "compilation_cache": 5,
    "tracking": 1,
    "writers": 2,
    "diagnosis": 2,
    "gradients": 2,
    "metrics": 3,
    "losses": 1,
    "normalize": 1,
    "optimizers": 2,
    "models": 2,
    "weights": 1,
    "data": 1,
    "precision": 1,
    "numerics": 1,
    "fused": 1,
    "varying": 0,
    "kernel_layout": 0,
    "autocast": 0,
}
# What a package may import from outside, besides the standard library.
FOREIGN = {
    "autocast": {"jax", "numpy"},
    "precision": {"jax", "jmp", "optax", "numpy"},
    "numerics": {"flax", "jax", "numpy"},
    "models": {"flax", "jax", "jmp"},
    "fused": {"jax"},
    "varying": {"jax"},
    "kernel_layout": {"jax"},
    "weights": {"numpy", "safetensors", "torch"},
    "data": {
        "PIL",
        "absl",
        "array_record",
        "cv2",
        "google",
        "grain",
        "numpy",
        "scipy",
        "simplejpeg",
        "sklearn",
        "tensorflow_datasets",
        "tqdm",
    },
    "diagnosis": {"jax"},
    "gradients": {"jax"},
    "losses": {"jax"},
    "normalize": {"jax"},
    "optimizers": {"jax", "optax"},
    "step": {"jax", "jmp", "numpy", "optax"},
    "metrics": {"jax"},
    "writers": {"tensorboardX"},
    "tracking": {"wandb"},
    "files": set(),
    "checksums": set(),
    "interrupts": set(),
    "leaves": {"jax", "numpy"},
    "resources": {"jax", "psutil", "pynvml"},
    "compilations": {"jax"},
    "compilation_cache": {"jax"},
    "loop": {"jax"},
    "setup": {"jax", "optax", "ml_collections"},
    "progress": {"tqdm"},
    "sampling": {"jax"},
    "workdir": set(),
    "checkpoints": {"jax", "numpy", "orbax"},
    "summary": {"jax"},
    "nonfinite": {"jax", "numpy"},
    "config": {"ml_collections"},
    "processes": {"jax"},
    "config_keys": set(),
    "build": {"jax", "optax", "ml_collections"},
    "devices": {"jax", "ml_collections"},
    "trained": {"jax", "jmp"},
    "initial": {"jax"},
    "arguments": set(),
    "convert": set(),
    "predict": {"jax", "numpy"},
    "export": {"jax", "numpy"},
    "exported_files": set(),
    "saved_model": {"jax", "jaxlib", "tensorflow"},
    "network": {"jax"},
    "doctor": {"ml_collections"},
    "checkup": {"jax", "ml_collections"},
    "examination": {"jax", "numpy"},
    "tapped": {"jax"},
    "sheet": {"PIL", "numpy"},
    "train": {"jax", "numpy", "optax", "ml_collections"},
    "evaluation": {"jax", "ml_collections"},
    "start": {"jax"},
    "main": {"absl", "jax", "ml_collections"},
    "replay": set(),
}
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path):
    """Full names of everything that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def unit(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path):
    own = unit(path)
    if own == "__init__":
        return
    for name in imports(path):
        parts = name.split(".")
        if parts[0] in ("configs", "experiments", "tests"):
            raise AssertionError(f"{path} imports {name}")
        if parts[0] == "mixedres" and parts[1] in LAYERS and parts[1] != own:
            assert LAYERS[parts[1]] < LAYERS[own], f"{own} imports {name}"
        elif parts[0] != "mixedres" and parts[0] not in sys.stdlib_module_names:
            assert parts[0] in FOREIGN[own], f"{own} imports {name}"
            assert parts[0] != "flax" or own == "models" or path.name == "linen.py", f"{path} imports flax"


def test_only_the_upper_layers_see_a_config():
    for path in FILES:
        if "ml_collections" in path.read_text():
            assert unit(path) in (
                "main",
                "train",
                "evaluation",
                "build",
                "devices",
                "config",
                "setup",
                "doctor",
                "checkup",
            ), path


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_readable(path):
    text = path.read_text()
    assert text.count("\n") <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            length = node.end_lineno - node.lineno + 1
            documentation = len((ast.get_docstring(node) or "").splitlines())
            assert length - documentation <= 60, f"{node.name}: {length - documentation} lines"


def run(code, tmp_path):
    """Runs `code` in a fresh interpreter that finds a tensorflow which must not be imported."""
    poison = tmp_path / "poison" / "tensorflow"
    poison.mkdir(parents=True)
    (poison / "__init__.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()\nraise SystemExit(99)\n")
    environment = {"PYTHONPATH": f"{poison.parent}:{ROOT}", "PATH": "", "JAX_PLATFORMS": "cpu", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "imported").exists()
    return done.stdout


@pytest.mark.slow
def test_a_whole_run_never_imports_tensorflow(tmp_path):
    code = (
        "import sys; from mixedres.main import main\n"
        f"common = ['--config={ROOT}/configs/cifar10.py:fp16,model=cifar_resnet8', '--config.data.name=synthetic', "
        "'--config.data.image_size=8', '--config.batch_size=8', '--config.steps=2', '--workdir=run']\n"
        "assert main(['mixedres', *common]) == 0\n"
        "assert main(['mixedres', *common, '--mode=eval']) == 0\n"
        "assert not [m for m in sys.modules if m.split('.')[0] == 'tensorflow']\n"
        "print('fine')"
    )
    assert run(code, tmp_path).endswith("fine\n")


@pytest.mark.parametrize(
    "module, absent",
    [
        ("mixedres.autocast", ["flax", "jmp", "optax", "absl", "ml_collections", "mixedres.precision"]),
        ("mixedres.numerics", ["flax", "jmp", "optax", "absl", "ml_collections", "mixedres.precision"]),
        ("mixedres.precision", ["flax", "absl", "ml_collections", "orbax", "sklearn", "tensorboardX"]),
        ("mixedres.data", ["flax", "jax", "sklearn", "mixedres.precision"]),
        ("mixedres.models", ["orbax", "sklearn", "ml_collections", "mixedres.precision"]),
    ],
)
def test_what_stands_alone(module, absent, tmp_path):
    # flax and optax import others (orbax, absl); only what the module adds to them counts.
    before = {"mixedres.models": "import flax.linen, jmp; ", "mixedres.precision": "import optax, jmp; "}.get(
        module, ""
    )
    code = f"{before}import sys; old = set(sys.modules); import {module}; print(*(set(sys.modules) - old))"
    loaded = run(code, tmp_path).split()
    for name in absent:
        assert not [m for m in loaded if m == name or m.startswith(name + ".")], name
