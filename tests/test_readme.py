"""What the documents show runs, and the numbers they quote are those in the files."""

import itertools
import json
import re
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import mixedres
from experiments import input as input_command
from experiments import readme
from experiments.lib import plan
from mixedres import data, precision
from mixedres.config import KEYS
from tests import ROOT
from tests.arrays import normal

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
README = (ROOT / "README.md").read_text()
# Pages that docs/generated.py adds to the site.
GENERATED = ("changelog.md", "contributing.md", "notebook.md", "security.md")


def run(path, without_tabs=False):
    """The names that the examples of a page leave, run in order as one program."""
    text, names = path.read_text(), {}
    if without_tabs:  # the first tab is plain JAX
        text = re.sub(r'^=== "(Flax|Equinox).*?(?=^\S)', "", text, flags=re.DOTALL | re.MULTILINE)
    with jax.numpy_rank_promotion("allow"):  # as users run them
        for code in map(textwrap.dedent, re.findall(r"```python\n(.*?)```", text, re.DOTALL)):
            exec(compile(code, "example.py", "exec"), names)
    return names


def test_documents_are_short():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    assert sum(bool(re.search(r"\w", word)) for page in pages for word in page.read_text().split()) <= 16_000


def test_example_of_the_readme_prints_its_reports(capsys):
    names = run(ROOT / "README.md")
    assert names["grads"].dtype == np.float32
    output = capsys.readouterr().out
    assert "1 of 1 operations of the allow list" in output and "float16 is fine here" in output


@pytest.mark.slow
def test_program_of_the_library_page_has_the_fault_and_the_repairs_that_it_tells(capsys):
    page = ROOT / "docs" / "library.md"
    names = run(page)
    output = capsys.readouterr().out
    for shown in re.findall(r"```text\n(.*?)```", page.read_text(), re.DOTALL):
        for line in shown.splitlines():
            assert re.split(r" ?\.\.\.", line)[0] in output, line
    first = names["report"].contributors[0]
    assert first.row.path == "attention" and ":15 " in first.row.source
    assert "True float16 is fine here" in output and "Take float16 at loss scale 2**" in output
    params, state, tokens = names["params"], names["state"], names["tokens"]
    program = names["step"].lower(params, state).as_text()
    products = re.findall(r"dot_general .*: \((.*)\) ->", program)
    assert len(products) == 24 and all(operands.count("xf16>") == 2 for operands in products)
    assert names["loss"] < names["loss_fn"](params, tokens) / 2 and names["loss"].dtype == np.float32
    # Its numbers without the tools: loss and gradients by JAX alone.
    loss, exact = jax.value_and_grad(names["loss_fn"])(names["grown"], tokens)
    half_loss, half = jax.value_and_grad(mixedres.autocast(names["loss_fn"]))(names["grown"], tokens)
    assert abs(half_loss - loss) < 5e-3
    assert max(np.linalg.norm(half[name] - exact[name]) / np.linalg.norm(exact[name]) for name in params) > 0.1


def test_autocast_example_prints_its_report(capsys, tmp_path):
    page = ROOT / "docs" / "autocast.md"
    names = run(page)
    printed = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    shown = re.search(r"```text\n(autocast of .*?)```", page.read_text(), re.DOTALL)[1].splitlines()
    summary, heads, rows = shown[0], shown[2].split(), shown[3:]
    assert summary in printed and heads == ["primitive", "category", "dtype", "reason"] and len(rows) >= 5
    for row in rows:
        assert any(line.startswith(" ".join(row.split())) for line in printed), row
    names["report"].to_html(tmp_path / "page.html")
    for made in (tmp_path / "page.html", ROOT / "docs" / "live" / "explain.html"):
        counts = re.search(r"of all (\d+) in .*; (\d+) more operations", text := made.read_text())
        assert text.count("<tr><td>") == sum(map(int, counts.groups())) > text.count('<i class="float16">') == 6


def test_numerics_examples_print_their_reports(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "numerics.md"
    names = run(page)
    output = capsys.readouterr().out
    assert (tmp_path / "report.html").exists() and "Take float16 at loss scale 2**" in output
    shown = re.search(r"```text\n(float16 is not fine.*?)```", page.read_text(), re.DOTALL)[1].splitlines()
    assert [line for line in shown if re.split(r" \.\.\.$| are off by", line)[0] not in output] == []
    assert not names["report"].is_fine and "first array that is not finite" in str(names["finding"])


def test_check_of_the_docs_ends_a_loop_that_skips_every_step():
    names = run(ROOT / "docs" / "precision.md", without_tabs=True)
    params, batch = {"w": normal(0, (8, 2))}, {"x": jnp.full((32, 8), jnp.nan), "y": normal(1, (32, 2))}
    tx = names["precision"].loss_scaled(names["clipped"], names["precision"].DynamicLossScale(2.0**24))
    state, start = tx.init(params), params
    for _ in range(24):
        params, state, _ = names["step"](params, state, batch)
    names["check"](state)
    params, state, _ = names["step"](params, state, batch)
    assert (params["w"] == start["w"]).all()
    with pytest.raises(FloatingPointError, match="25 steps in a row were skipped"):
        names["check"](state)


@pytest.mark.slow
def test_tabs_of_the_docs_keep_statistics_of_a_skipped_step(tmp_path, monkeypatch):
    """With Linen, NNX and Equinox a step moves weights and statistics; after an overflow forward, neither."""
    pytest.importorskip("equinox")
    monkeypatch.chdir(tmp_path)
    names, batch = run(ROOT / "docs" / "precision.md"), {"x": normal(0, (32, 8)), "y": normal(99, (32, 2))}
    variables, nnx = names["Network"]().init(jax.random.key(0), batch["x"], False), names["nnx"]
    params = variables["params"]

    def nnx_values():
        return nnx.as_pure((nnx.state(names["model"], nnx.Param), nnx.state(names["model"], nnx.BatchStat)))

    def equinox_values(module, stats):
        return [leaf for leaf in jax.tree.leaves((module, stats)) if hasattr(leaf, "dtype")]

    def move(batch):
        """Returns the trees before and after a step of each tab, and what has the optimizer's state."""
        linen = names["linen_step"](params, variables["batch_stats"], names["tx"].init(params), batch)
        before = nnx_values()
        names["nnx_step"](names["model"], names["optimizer"], batch)
        module = names["eqx_step"](names["module"], names["stats"], names["module_state"], batch)
        yield (params, variables["batch_stats"]), linen[:2], linen[2]
        yield before, nnx_values(), names["optimizer"]
        yield equinox_values(names["module"], names["stats"]), equinox_values(*module[:2]), module[2]

    for x, finite in ((batch["x"], True), (jnp.asarray(batch["x"]).at[0].set(1e5), False)):
        for before, after, holder in move({"x": x, "y": batch["y"]}):
            moved = [np.abs(np.asarray(b, float) - a).max() > 0 for a, b in pairs(before, after)]
            assert (all(moved[-2:]) and sum(moved) >= 4) if finite else not any(moved)  # mean and variance are last
            names["check"](holder)
            assert bool(precision.find_state(holder).grads_finite) == finite


def pairs(*trees):
    return zip(*map(jax.tree.leaves, trees), strict=True)


@pytest.mark.slow
def test_microbatches_of_the_docs():
    """A scan over microbatches takes the step of the whole batch."""
    names = run(ROOT / "docs" / "precision.md", without_tabs=True)
    params, batch = {"w": normal(0, (8, 2))}, {"x": normal(1, (32, 8)), "y": normal(2, (32, 2))}
    state = names["tx"].init(params)
    whole = names["step"](params, state, batch)
    parts = names["accumulate"](params, state, jax.tree.map(lambda x: x.reshape(4, 8, -1), batch))
    np.testing.assert_allclose(parts[2], whole[2], rtol=1e-3)
    for left, right in pairs(parts[1].inner_state, whole[1].inner_state):
        np.testing.assert_allclose(left, right, rtol=1e-2, atol=1e-4)


def test_input_costs_equal_the_results_file():
    results = json.loads((ROOT / "experiments" / "results" / "input_loaders.json").read_text())
    page = (ROOT / "docs" / "imagenet.md").read_text()
    assert "\n".join(input_command.loaders(results["medians"])) in page
    words = " ".join(page.split())
    assert f"medians of {results['rounds']} rounds" in words and results["processor"].rstrip() in words


def test_batches_of_the_docs(capsys):
    run(ROOT / "docs" / "imagenet.md")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(line.startswith("(32, 16, 16, 1) uint8 [") for line in lines)


@pytest.mark.interop
def test_torch_source_of_the_docs_is_a_function_of_seed_and_step():
    """From any first step, and for two hosts; an epoch has every example at most once."""
    pytest.importorskip("torch")
    code = re.search(r"```py\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)[1]
    images, labels = np.full((1437, 8, 8, 1), 128, np.uint8), np.arange(1437, dtype=np.int32)
    names = {"np": np, "data": data, "images": images, "LABELS": labels, "NoisyDigits": data.DataInfo}
    exec(compile(code, "example.py", "exec"), names)
    source = names["TorchDigits"](image_shape=(8, 8, 1), num_classes=1437, train_examples=1437, eval_examples=0)

    def take(count, **options):
        return list(itertools.islice(source.train_batches(100, **{"seed": 1} | options), count))

    batches = take(16)
    data.check_batch(batches[0], source, "torch", 100, has_mask=False)
    assert [len({*np.concatenate([b["label"] for b in part])}) for part in (batches[:14], batches[14:])] == [1400, 200]
    noise = np.concatenate([b["image"] for b in batches]).astype(float) - 128
    assert abs(noise.std() - 20) < 0.2 and abs(np.corrcoef(noise[:100].ravel(), noise[100:200].ravel())[0, 1]) < 0.05
    halves = [take(16, shard=data.Shard(host, 2)) for host in (0, 1)]
    joined = [{key: np.concatenate([a[key], b[key]]) for key in a} for a, b in zip(*halves, strict=True)]
    for same in (take(3, first_step=13), joined[13:]):
        jax.tree.map(np.testing.assert_array_equal, same, batches[13:])
    assert (take(1, seed=2)[0]["image"] != batches[0]["image"]).any()


def test_config_of_the_docs_is_a_config():
    assert run(ROOT / "docs" / "runs.md")["get_config"]("fp16,epochs=3").epochs == 3.0


def test_sweep_of_the_docs_is_a_sweep():
    assert len(plan.expand(run(ROOT / "docs" / "experiments.md")["SWEEP"])) == 16


# The flags of TensorFlow's official ResNet that matter to its users.
FLAGS = """
data_dir model_dir clean resnet_size resnet_version train_epochs max_train_steps epochs_between_evals skip_eval
eval_only stop_threshold batch_size num_gpus distribution_strategy worker_hosts task_index dtype loss_scale
fp16_implementation use_synthetic_data pretrained_model_checkpoint_path fine_tune enable_lars label_smoothing
weight_decay export_dir image_bytes_as_serving_input profile_steps datasets_num_private_threads all_reduce_alg
data_format
"""


def test_migration_examples_run():
    page = ROOT / "docs" / "migration.md"
    names = run(page)
    assert names["loss"] < 0.2 and names["loss"].dtype == np.float32
    params, steps, state = names["params"], (names["step"], names["by_hand"]), names["tx"].init(names["params"])
    for step in steps:
        assert "preferred_element_type=float16" in str(jax.make_jaxpr(step)(params, state))
    moved = [step(params, state)[0]["w2"] for step in steps]  # equal up to the rounding of float16
    assert np.abs(moved[0]).max() > 0
    np.testing.assert_allclose(*moved, atol=2e-3 * np.abs(moved[0]).max())
    assert names["train_state"].step == 1 and int(names["train_state"].opt_state.loss_scale.total_skipped) == 0
    assert {g.dtype for g in jax.tree.leaves(names["bf16_grads"])} == {np.dtype(np.float32)}
    text = page.read_text()
    assert [flag for flag in FLAGS.split() if not re.search(rf"^\| .*`--{flag}\b", text, re.MULTILINE)] == []


def test_results_are_made_from_the_files():
    """python -m experiments.readme writes them."""
    assert f"{readme.BEGIN}\n\n{readme.summary()}\n\n{readme.END}" in README
    assert readme.PAGE.read_text() == readme.page()
    for name, (_, rows) in readme.pictures().items():
        with Image.open(readme.IMAGES / f"{name}.png") as picture:
            assert picture.text["Description"] == readme.digest(rows), name


# A number with a unit, or with an exponent, in the text of a page.
MEASURED = re.compile(
    r"(?<![\w.=-])\d[\d.,]* ?(?:%|(?:ms|µs|s|seconds?|minutes?|hours?|times|MB|GB)\b)|\d(?:\.\d+)?e-\d+"
)
# What gives a number: a command or a file that the same paragraph names, or results.md, which is made from files.
SOURCE = re.compile(
    r"measured by: |`python -m\s+experiments\.|`pytest |`tests/|`experiments/|python examples/|\(results\.md|published"
)
# Numbers that are chosen, and not measured: limits, levels, ranges of random draws.
DEFINITIONS = {
    "README.md": "95 %",
    "autocast.md": "1e-8",
    "experiments.md": "95 %",
    "glossary.md": "95 %",
    "imagenet.md": "100 % 2e-4",
    "library.md": "2 % 10 %",
    "migration.md": "1e-4 2e-4 4 times",
    "numerics.md": "0.05 % 0.1 % 0.4 % 1 % 2 % 10 % 99.9 % 1e-8",
    "precision.md": "6e-8",
    "scale-out.md": "30 s",
}


@pytest.mark.parametrize("name", ["README.md", *sorted(path.name for path in (ROOT / "docs").glob("*.md"))])
def test_measured_numbers_name_their_source(name):
    """A command, a test or a file in the same paragraph, item or table; a comment will do."""
    path = ROOT / name if name == "README.md" else ROOT / "docs" / name
    text = re.sub(r"```.*?```|^    .*?$|<!-- results.*?<!-- end", "", path.read_text(), flags=re.M | re.S)
    for block in re.split(r"\n\s*\n|\n(?=- )", text):
        found = set(MEASURED.findall(re.sub(r"`[^`]*`", "", block))) - set(
            re.findall(MEASURED, DEFINITIONS.get(name, ""))
        )
        assert not found or SOURCE.search(block) or path == readme.PAGE, f"{found} in: {block}"


# Words of a promise that a test can break.
PROMISE = re.compile(
    r"refused|nothing (?:was|is) |no bit|same bits|skipped|escaped|compared|are not taken|warning|trusted"
)


@pytest.mark.parametrize("name", ["SECURITY.md", "docs/runs.md"])
def test_promises_name_their_tests(name):
    """In a comment of the same row, item or paragraph: <!-- tests: test_one test_another -->."""
    text = re.sub(r"```.*?```|^    .*?$|^#.*?$", "", (ROOT / name).read_text(), flags=re.M | re.S)
    functions = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    for block in re.split(r"\n\s*\n|\n(?=- |\d\. |\|)", text):
        tests = re.findall(r"test_\w+", " ".join(re.findall(r"<!-- tests: (.*?) -->", block)))
        assert tests or not PROMISE.search(block), f"no test is named beside: {block}"
        assert set(tests) <= functions, set(tests) - functions


def test_live_pages_are_small_and_self_contained():
    pages = sorted((ROOT / "docs" / "live").glob("*.html"))
    assert len(pages) >= 5
    for page in pages:
        text = page.read_text()
        assert len(text) < 400_000 and not re.search(r"(src|href)=\"(https?:)?//", text), page.name


def test_table_of_presets_is_complete():
    page = (ROOT / "docs" / "precision.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([^|]*) \|", page, re.MULTILINE)
    shown = {name: (dtype, scale) for name, dtype, scale in rows if name in precision.PRESETS}
    assert set(shown) == set(precision.PRESETS)
    for name in precision.PRESETS:
        preset = precision.get(name)
        dtype, scale = shown[name]
        assert dtype == np.dtype(preset.policy.compute_dtype).name
        expected = f"{preset.loss_scale:g}" if isinstance(preset.loss_scale, float) else preset.loss_scale
        assert scale.strip().startswith(expected)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_keys_exist(path):
    text = path.read_text()
    docs = ROOT / "docs"
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if docs in path.parents and target in GENERATED:
            continue
        found = (path.parent / target).resolve()
        assert found.exists(), target
        # the site has only what is in docs/
        assert docs not in path.parents or docs in found.parents, target
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert re.match(r".+\n\|[ :|-]+\n", table), f"no heads: {table}"
    for key in re.findall(r"--config\.([\w.]+)=", text):
        assert key in {k.path for k in KEYS} or key == "KEY", key
    for file in re.findall(r"\b(?:configs|experiments|tests)/[\w/]+\.[a-z]+\b", text):
        assert (ROOT / file).exists(), file
    if path.name == "CHANGELOG.md":  # names what is gone
        return
    for key in re.findall(r"`((?:batch_norm|data|loss_scale|optimizer|schedule)\.\w+)[`=]", text):
        assert key in {k.path for k in KEYS} or key.endswith((".json", ".py")), key
    for file in re.findall(r"\bmixedres/[\w/]+\.py\b", text):
        assert (ROOT / file).exists(), file
    for module in re.findall(r"(?:python -m |`)((?:mixedres|experiments)(?:\.\w+)+)", text):
        assert is_command_or_name(module), module


def is_command_or_name(dotted):
    """Whether `mixedres.a.b` is a module, or the name b of the module mixedres.a."""
    *parents, name = dotted.split(".")
    place = ROOT.joinpath(*parents)
    if (place / name).is_dir() or (place / f"{name}.py").exists():
        return True
    source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return source.exists() and bool(re.search(rf"\b{name}\b", source.read_text()))


def test_commands_of_the_pages_run_as_modules():
    """A package needs __main__.py for python -m."""
    for module in re.findall(r"python -m ((?:mixedres|experiments)(?:\.\w+)+)", "".join(p.read_text() for p in PAGES)):
        place = ROOT.joinpath(*module.split("."))
        assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), module


def test_citation_and_package_have_one_version():
    assert re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1] == mixedres.__version__
