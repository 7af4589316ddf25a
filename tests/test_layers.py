"""The architecture: the rule of imports, the budgets, private APIs, and commands that answer before JAX is imported."""

import ast
import collections
import functools
import json
import subprocess
import sys

import pytest

from tests import ROOT

PACKAGE = ROOT / "mixedres"
# The whole rule of imports: a line imports only from lines above it, and no unit of a line knows another of that line.
LAYERS = (
    ("_internal",),
    ("amp", "numerics", "models", "data"),
    ("precision",),
    ("config",),
    ("checkpoints",),
    ("train", "predict"),
    ("doctor", "replay"),
    # The rooms around the core. Each may be deleted, with its line in `mixedres/__init__.py` and its command.
    ("export", "hosts", "original", "other_libraries", "photographs", "trackers"),
    ("run",),
    ("main",),
    ("__main__",),
)
ROOMS = {"export", "hosts", "original", "other_libraries", "photographs", "trackers"}
# The imports within a line. A command writes what other libraries read.
BESIDE = {("numerics", "amp"), ("export", "other_libraries")}
# Imports from outside the standard library: what a unit needs. Units that are not here may import what `train` brings.
NEEDS = {
    "_internal": {"jax", "jaxlib", "numpy", "tqdm"},
    "amp": {"jax", "numpy"},
    "numerics": {"jax", "numpy", "flax"},
    "models": {"jax", "flax", "jmp"},
    "data": {"PIL", "absl", "array_record", "cv2", "google", "google_crc32c", "grain", "numpy", "scipy"}
    | {"simplejpeg", "sklearn", "tensorflow_datasets", "tqdm"},
    "precision": {"jax", "jmp", "numpy", "optax"},
    "config": {"jax", "ml_collections"},
}
# The only files that may use what has no public name.
COMPAT = {"_internal/jax_compat.py", "data/images/grain_compat.py"}
# Most lines of each unit, of JavaScript, of tests and of experiments. A number falls with every change that makes room,
# and rises only by a commit that says what was worth it.
LINES = {
    "_internal": 2571,
    "amp": 3660,
    "checkpoints": 1975,
    "config": 887,
    "data": 2979,
    "doctor": 352,
    "models": 1771,
    "numerics": 4125,
    "precision": 1093,
    "predict": 575,
    "train": 3645,
    "": 666,
    "export": 617,
    "hosts": 457,
    "original": 1114,
    "other_libraries": 434,
    "photographs": 1226,
    "trackers": 199,
    "javascript": 499,
    "tests": 28471,
    "experiments": 7434,
}
# Most names that tests import past an `__init__`: a file whose names no test imports moves freely.
DEEP_NAMES = 122
COMMANDS = ("main", "replay", "predict", "export", "doctor", "photographs.check", "photographs.prepare", "__main__")
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in FILES}


def name_of(path):
    """The dotted name of a file: 'mixedres.train' for mixedres/train/__init__.py."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in FILES}


@functools.cache
def imports(path):
    """Full names of everything that a file imports, anywhere in it: modules of ours as modules."""
    found = set()
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                ours = node.module.split(".")[0] == "mixedres"
                found.add(full if full in MODULES or not ours else node.module)
    return found


def unit(name):
    return name.split(".")[1] if "." in name else ""


def layer(of):
    return next(index for index, units in enumerate(LAYERS) if of in units)


def test_every_unit_has_a_layer():
    assert {unit(name) for name in MODULES} - {""} == {of for units in LAYERS for of in units}


def test_imports_point_down():
    for own, name in {(unit(name_of(path)), name) for path in FILES for name in imports(path)}:
        root = name.split(".")[0]
        assert root not in ("configs", "experiments", "examples", "tests", "tensorflow_cpu"), name
        if root == "mixedres" and own and unit(name) not in ("", own):
            allowed = layer(unit(name)) < layer(own) or (own, unit(name)) in BESIDE
            assert allowed, f"{own} imports {name}"
        elif root not in sys.stdlib_module_names and root != "mixedres" and own in NEEDS:
            assert root in NEEDS[own], f"{own} imports {name}"


def test_core_imports_no_room():
    """What a command gives a run, and what a room registers, is all that the core has of the rooms."""
    for path in FILES:
        own, rooms = unit(name_of(path)), {unit(name) for name in imports(path) if name.startswith("mixedres.")} & ROOMS
        assert own in ROOMS or not rooms or path.name in ("__init__.py", "main.py"), f"{path}: {rooms}"
        assert own not in ROOMS or rooms <= {own} | {room for beside, room in BESIDE if beside == own}, path


def test_libraries_are_imported_only_by_the_listed_files():
    for path in FILES:
        file, roots = str(path.relative_to(PACKAGE)), {name.split(".")[0] for name in imports(path)}
        if file.startswith("_internal/") and "jax" in roots:
            names = ("jaxprs/control_flow", "jax_compat", "tree", "mesh", "types", "cli/compilation")
            assert file in {f"_internal/{name}.py" for name in names}, file
        if "flax" in roots:
            assert file.startswith("models/") or file == "numerics/counting/taps.py", file
        if "tensorflow" in roots:
            assert file in ("export/saved_model.py", "original/weights_files.py"), file
        private = {name for name in imports(path) if "._src" in name or name.startswith("jaxlib")}
        assert not private or file in COMPAT, f"{file} imports {private}"


def public_names(package):
    """The names in `__all__` of mixedres/`package`."""
    for node in TREES[PACKAGE / package / "__init__.py"].body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def test_names_of_other_packages_come_through_their_init():
    units = {path: unit(name_of(path)) for path in FILES}
    for own, node in ((units[path], node) for path in FILES for node in ast.walk(TREES[path])):
        if not isinstance(node, ast.ImportFrom) or not own or not node.module.startswith("mixedres."):
            continue
        other, names = unit(node.module), {alias.name for alias in node.names}
        if other not in (own, "_internal"):
            assert node.module == f"mixedres.{other}", f"{node.module} is behind the __init__ of {other}"
            assert names <= public_names(other), f"{names - public_names(other)} of {other} are not in its __all__"


def test_no_module_has_the_name_of_a_public_function():
    """Within a package, so that an attribute of it is either a module or a function; every command has a `main`."""
    for top in {unit(name) for name in MODULES} - {""}:
        files = [path for path in FILES if unit(name_of(path)) == top]
        functions = {
            node.name: path
            for path in files
            for node in TREES[path].body
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and node.name != "main"
        }
        modules = {part for path in files for part in name_of(path).split(".")[1:]}
        assert not modules & functions.keys(), {name: functions[name] for name in modules & functions.keys()}


def test_only_console_prints():
    """What data say is escaped there, and a log that cannot be written ends nothing."""
    calls = [(path, node.func) for path in FILES for node in ast.walk(TREES[path]) if isinstance(node, ast.Call)]
    printing = {path for path, called in calls if isinstance(called, ast.Name) and called.id == "print"}
    assert printing == {PACKAGE / "_internal" / "cli" / "console.py"}


def test_no_import_goes_in_a_circle():
    """Between modules, imports inside functions and for type checkers included."""
    graph = {name: {other for other in imports(path) if other in MODULES} for name, path in MODULES.items()}
    graph = {name: {other for other in found if not name.startswith(f"{other}.")} for name, found in graph.items()}
    while graph:
        leaves = {name for name, found in graph.items() if not found & graph.keys()}
        assert leaves, f"a circle among {sorted(graph)}"
        graph = {name: found for name, found in graph.items() if name not in leaves}


def test_files_and_functions_stay_readable():
    assert max(path.read_text().count("\n") for path in FILES) <= 400
    for node in (node for path in FILES for node in ast.walk(TREES[path]) if isinstance(node, ast.FunctionDef)):
        length = node.end_lineno - node.lineno + 1
        assert length <= 60, f"{node.name}: {length} lines"


def lines(paths):
    return sum(path.read_text().count("\n") for path in paths)


def test_no_unit_grows():
    sizes = collections.Counter()
    for path in FILES:
        own = unit(name_of(path))
        sizes[own if own in LINES else ""] += lines([path])
    sizes["javascript"] = lines(PACKAGE.rglob("*.js"))
    sizes |= {name: lines((ROOT / name).rglob("*.py")) for name in ("tests", "experiments")}
    assert {name: size for name, size in sizes.items() if size > LINES[name]} == {}
    assert {name: size for name, size in sizes.items() if size < LINES[name] - 50} == {}, "the budget falls as well"


def test_tests_reach_no_deeper_past_init():
    deep = []
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mixedres."):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                past = [
                    name for name in names if node.module.count(".") > 1 or (name in MODULES and "." in node.module)
                ]
                deep += [name for name in past if unit(name) != "_internal"]
    assert len(deep) <= DEEP_NAMES, len(deep)


def test_folders_stay_readable():
    entries = [path for path in PACKAGE.iterdir() if path.name not in ("__init__.py", "__pycache__", "py.typed")]
    assert len(entries) - len(ROOMS) <= 16
    for folder in {path.parent for path in FILES}:
        modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(modules) <= 12, folder


def run(code, tmp_path):
    """Runs `code` in a fresh interpreter, and returns its last line as JSON.

    The interpreter finds packages torch and tensorflow, which must not be imported.
    """
    poison = tmp_path / "poison"
    for name in ("torch", "tensorflow"):
        (poison / name).mkdir(parents=True)
        told = f"open({str(tmp_path / 'imported')!r}, 'w').close()\nraise SystemExit(99)\n"
        (poison / name / "__init__.py").write_text(told)
    environment = {"PYTHONPATH": f"{poison}:{ROOT}", "PATH": "", "JAX_PLATFORMS": "cpu", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "imported").exists()
    return json.loads(done.stdout.splitlines()[-1])


def test_help_does_not_wait_for_jax(tmp_path):
    """Nor do data and configs: one process imports and asks all of them."""
    packages = [name for name in COMMANDS if (PACKAGE / name.replace(".", "/")).is_dir()]
    modules = [f"mixedres.{name}{'.__main__' if name in packages else ''}" for name in COMMANDS]
    code = f"""
import importlib, json, sys
import mixedres.data, mixedres.config
for name in {modules}:
    module = importlib.import_module(name)
    main = module.run_subcommand if name == "mixedres.__main__" else module.main
    try:
        assert main([name, "--help"]) == 0
    except SystemExit as left:
        assert left.code == 0
print(json.dumps(sorted({{"jax", "flax", "optax", "orbax", "cv2"}} & sys.modules.keys())))
"""
    assert run(code, tmp_path) == []


@pytest.mark.slow
def test_whole_run_imports_neither_torch_nor_tensorflow(tmp_path):
    code = f"""
import json, sys
from mixedres.main import main
common = ["--config={ROOT}/configs/cifar10.py:fp16,model=cifar_resnet8", "--config.data.name=synthetic",
          "--config.data.image_size=8", "--config.batch_size=8", "--config.steps=2", "--workdir=run"]
assert main(["mixedres", *common]) == 0
assert main(["mixedres", *common, "--mode=eval"]) == 0
print(json.dumps([name for name in sys.modules if name.split(".")[0] in ("torch", "tensorflow")]))
"""
    assert run(code, tmp_path) == []


# For each process: (modules, what is imported before them, what they must not bring), in the order of the imports.
PROCESSES = {
    "data and libraries": [
        ("mixedres", "json", "jax numpy flax optax mixedres.amp mixedres.data mixedres.train"),
        # Workers that only read data have no use for JAX, and what only some data sets need is slow to import.
        (
            "mixedres.data",
            "numpy",
            "jax jaxlib flax jmp optax absl sklearn scipy grain tensorflow_datasets array_record cv2 PIL simplejpeg "
            "mixedres.config mixedres.data.datasets mixedres.data.images",
        ),
        # flax and optax import others (orbax, absl); only what the module adds to them counts.
        ("mixedres.amp mixedres.numerics", "jax", "flax jmp optax absl ml_collections mixedres.precision"),
        ("mixedres.precision", "optax jmp", "flax ml_collections orbax sklearn tensorboardX"),
    ],
    "commands": [
        ("mixedres.models", "flax.linen jmp", "orbax sklearn ml_collections mixedres.precision"),
        ("mixedres.predict.inference mixedres.export.network", "", "mixedres.train mixedres.doctor tensorboardX"),
        ("mixedres.train.run mixedres.export.weights mixedres.doctor.examination mixedres.replay", "", ""),
    ],
}


@pytest.mark.parametrize("process", PROCESSES)
def test_libraries_import_no_more_than_they_need(process, tmp_path):
    """In processes, because this one has imported all. Neither torch nor tensorflow, whatever is imported."""
    code = f"""
import importlib, json, sys
found = []
for modules, before, _ in {PROCESSES[process]}:
    for name in before.split():
        importlib.import_module(name)
    old = set(sys.modules)
    for name in modules.split():
        importlib.import_module(name)
    found.append(sorted(set(sys.modules) - old))
print(json.dumps(found))
"""
    for (modules, _, absent), loaded in zip(PROCESSES[process], run(code, tmp_path), strict=True):
        for name in absent.split():
            assert not [each for each in loaded if each == name or each.startswith(f"{name}.")], (modules, name)
