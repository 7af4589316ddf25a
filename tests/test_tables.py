"""What the tables of the docs tell a reader to write, executed: a row without a case fails."""

import contextlib
import dataclasses
import io
import re
import shlex
import textwrap

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from mixedres import autocast, config, explain, precision
from mixedres.__main__ import run_subcommand
from mixedres.train import plan
from tests import ROOT
from tests.arrays import normal

HEADS = ("write", "here", "add")  # of the last column, which is to be typed
BATCH, PARAMS, RATE, SCALE = normal(1, (16, 4)), {"w": normal(0, (4, 3))}, 0.1, 2.0**10
PAGE = (ROOT / "docs" / "precision.md").read_text()


def rows():
    """{first code of a row: (the first cell, codes of the last cell)}, for the tables with these heads."""
    found, head = {}, ""
    for line in "\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))).splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if not cells or not head:
            head = cells[-1] if cells else ""
        elif head in HEADS and set(line) - set("|-"):
            name = (re.findall("`([^`]+)`", cells[0]) or cells)[0]
            assert name not in found, name
            found[name] = cells[0], re.findall("`([^`]+)`", cells[-1])
    return found


ROWS = rows()


def loss_fn(params, batch=BATCH):
    return jnp.square(batch @ params["w"]).mean()


def exact(batch=BATCH):
    """The loss and its gradient in float64."""
    x, w = np.float64(batch), np.float64(PARAMS["w"])
    return np.square(x @ w).mean(), 2 * x.T @ (x @ w) / (x @ w).size


def written(code, **more):
    """The value of a cell's code, which may be an assignment, in a program with the names of the pages."""
    tx, scale = optax.sgd(RATE), precision.DynamicLossScale(SCALE)
    names = {"jax": jax, "jmp": jmp, "optax": optax, "precision": precision, "explain": explain}
    names |= {"autocast": autocast, "DynamicScale": DynamicScale, "DynamicLossScale": precision.DynamicLossScale}
    names |= {"loss_fn": loss_fn, "half_loss": autocast(loss_fn), "grad_fn": precision.value_and_grad(loss_fn)}
    names |= {"state": precision.loss_scaled(tx, scale).init(PARAMS), "params": PARAMS, "batch": BATCH}
    names |= {"tx": tx, "scale": scale, "loss_scale": scale} | more
    exec(f"result = {code.replace('...', 'batch')}", names)
    return names["result"]


def close(value, expected, rtol=1e-5):
    np.testing.assert_allclose(value, expected, rtol=rtol, atol=rtol)


def gradients(code, rtol=1e-5, **more):
    """The code returns the loss and its gradients, which carry the scale."""
    loss, grads = written(code, **more)
    close(loss, exact()[0], rtol)
    close(grads.unscaled()["w"], exact()[1], rtol)
    assert (grads.scale == SCALE).all()
    return grads


def half_gradients(code, **more):
    grads = gradients(code if "(state" in code else f"{code}(state, params)", rtol=5e-3, **more)
    assert np.abs(grads.unscaled()["w"] - exact()[1]).max() > 1e-5


def optimizer(code, largest=np.inf):
    """The code makes an optimizer that unscales before it clips, and skips a step that is not finite."""
    tx = written(code)
    state = tx.init(PARAMS)
    _, grads = written("grad_fn(state, params, batch)", state=state)
    updates, state = tx.update(grads, state, PARAMS)
    close(updates["w"], -RATE * exact()[1] * min(1, largest / np.linalg.norm(exact()[1])))
    before = state.loss_scale.loss_scale
    updates, state = tx.update(jax.tree.map(lambda x: x * jnp.inf, grads), state, PARAMS)
    assert not np.any(updates["w"]) and not state.grads_finite and state.loss_scale.loss_scale == before / 2


def half(code, dtype="f16"):
    """The code makes the loss in half."""
    function = written(code)
    assert f"{dtype}[4,3] = convert_element_type" in str(jax.make_jaxpr(function)(PARAMS))
    close(function(PARAMS), exact()[0], 2e-2)


def kept(code, scope='with jax.named_scope("head"):'):
    """The code makes a loss whose scope is float32."""
    names = {"jax": jax, "batch": BATCH}
    exec(f"def loss_fn(params):\n    {scope}\n        return ((batch @ params['w']) ** 2).mean()", names)
    function = written(code, loss_fn=names["loss_fn"])
    assert "f16" not in str(jax.make_jaxpr(function)(PARAMS))
    close(function(PARAMS), exact()[0])


def loss_scale(initial, period, factor=2.0, minimum=2.0**-14):
    """A case: the code makes a loss scale with these numbers."""

    def case(code):
        scale = written(code, scale=initial, period=period, factor=factor, minimum=minimum)
        assert isinstance(scale, jmp.DynamicLossScale) and scale.loss_scale == initial
        last, one_more = (dataclasses.replace(scale, counter=jnp.int32(period - n)) for n in (1, 2))
        assert last.adjust(True).loss_scale == initial * factor and one_more.adjust(True).loss_scale == initial
        assert scale.adjust(False).loss_scale == initial / factor and scale.min_loss_scale == minimum

    return case


def as_flax(code):
    loss_scale(float(DynamicScale().scale), 2001)(code)
    for done in (1999, 2000):
        theirs = DynamicScale(growth_interval=2000, fin_steps=jnp.int32(done)).value_and_grad(lambda x: x)(1.0)[0]
        ours = dataclasses.replace(written(code), counter=jnp.int32(done)).adjust(True)
        assert theirs.scale == ours.loss_scale


def norm(code):
    close(written(code, grads=written("grad_fn(state, params, batch)[1]")), np.linalg.norm(exact()[1]))


def several(code):
    """A batch that overflows leaves the mean over four batches to the fifth."""
    tx, batches = written(code), [normal(i, (16, 4)) for i in range(4)]
    state = tx.init(PARAMS)
    for batch in (batches[0], BATCH * jnp.inf, *batches[1:]):
        _, grads = written("grad_fn(state, params, batch)", state=state, batch=batch)
        updates, state = tx.update(grads, state, PARAMS)
    close(updates["w"], -RATE * np.mean([exact(batch)[1] for batch in batches], axis=0))


def train_state(gradient, apply="train_state.apply_gradients(grads=grads)"):
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=written("precision.loss_scaled(tx, scale)"))
    grads = gradients(gradient, train_state=state)
    moved = written(apply, train_state=state, grads=grads)
    close(moved.params["w"], PARAMS["w"] - RATE * exact()[1])


def shard_map(call, mean, _):
    """Without the pcast of the cell, gradients are eight times too large."""

    def step(params, batch):
        return written(mean, grads=written(call, params=params, batch=batch)[1])

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    grads = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))(PARAMS, BATCH)
    close(grads.unscaled()["w"], exact()[1])


def partition(make, gradient, apply, _):
    """An overflow in one part leaves it and its scale alone; the other part is trained on."""
    tx, params = written(make), {"a": PARAMS, "b": {"w": 2 * PARAMS["w"]}}
    state = tx.init(params)
    grads_a = gradients(gradient, state=state, params=params)
    _, grads_b = written(gradient.replace('"a"', '"b"'), state=state, params=params)
    bad = jax.tree.map(lambda x: x * jnp.inf, grads_b)
    updates, state = written(apply, tx=tx, state=state, params=params, grads_a=grads_a, grads_b=bad)
    close(updates["a"]["w"], -RATE * exact()[1])
    assert not np.any(updates["b"]["w"])
    scales = [precision.find_state(state.inner_states[part]).loss_scale.loss_scale for part in "ab"]
    assert scales == [SCALE, SCALE / 2]


def skipping(code, **frozen):
    """The optimizer moves a parameter by its gradient and leaves those that are frozen; a step is skipped for all."""
    tx = written(code, labels={"w": "train"} | dict.fromkeys(frozen, "freeze"))
    state = tx.init(params := PARAMS | frozen)
    grad_fn = precision.value_and_grad(
        lambda params, batch: loss_fn(params, batch) + sum(params[n].sum() for n in frozen)
    )
    for batch, finite in ((BATCH, True), (BATCH * jnp.inf, False)):
        _, grads = grad_fn(state, params, batch)
        updates, state = tx.update(grads, state, params)
        close(updates["w"], -RATE * exact()[1] * finite)
        assert state.grads_finite == finite and not any(np.any(updates[name]) for name in frozen)


def selection(code):
    """The code keeps the old statistics of a skipped step."""
    for finite, expected in ((True, 1.0), (False, 2.0)):
        names = {"state": written("state")._replace(grads_finite=jnp.asarray(finite)), "new": jnp.ones(3)}
        assert (written(code, old=jnp.full(3, 2.0), **names) == expected).all()


def scaled_by_hand(code):
    by_hand = jax.tree.map(lambda g: g * SCALE, jax.grad(loss_fn)(PARAMS))
    close(written(code, grads=by_hand).unscaled()["w"], exact()[1])


def update(code):
    tx = written("precision.loss_scaled(tx, scale)")
    updates, _ = written(f"{code}(grad_fn(state, params)[1], state, params)", tx=tx)
    close(updates["w"], -RATE * exact()[1])


def clipping(code):
    optimizer(f"precision.loss_scaled({code}, loss_scale)", largest=1.0)


def tf32(code):
    with written(code.removeprefix("with ").removesuffix(":")):
        assert jax.config.jax_default_matmul_precision == precision.get("tf32").matmul_precision


def was_skipped(code):
    state = written("state")
    assert [bool(written(code, state=state._replace(grads_finite=jnp.asarray(x)))) for x in (True, False)] == [0, 1]


def save_and_restore(*_):
    """The functions of the first tab bring a state back with the same bits."""
    tab, names, file = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1], {}, io.BytesIO()
    exec(textwrap.dedent(tab), names)
    names["save"](file, saved := (PARAMS, written("state")))
    file.seek(0)
    back = names["restore"](file, jax.tree.map(jnp.zeros_like, saved))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), back, saved)


def policy(code, _):
    name = "params=float32,compute=float16,output=float32"
    assert name in " ".join(ROWS) and written(code) == jmp.get_policy(name)


def explained(code):
    decisions = written(code.replace("(...)", "(params)")).decisions
    assert {d.dtype for d in decisions if d.primitive == "reduce_sum"} == {np.dtype("float32")}


def both(*cases):
    """A case of several codes, in order; None: a name that other rows run."""
    return lambda *codes: [case(code) for case, code in zip(cases, codes, strict=True) if case]


CASES = {
    "TrainState": train_state,
    "optax.MultiSteps": both(several, None),
    "jax.shard_map": shard_map,
    "two losses with a scale each": partition,
    "frozen parameters": lambda code: skipping(code, frozen=jnp.ones(2)),
    "a moving average (EMA)": lambda code, _: close(
        written(code, ema={"w": 0 * PARAMS["w"]})["w"], 0.001 * PARAMS["w"]
    ),
    "running statistics": selection,
    "a log of gradients": both(None, norm),
    "a loss that you scaled yourself": scaled_by_hand,
    'Accelerator(mixed_precision="fp16")': both(half, optimizer),
    "accelerator.backward(loss)": half_gradients,
    "accelerator.clip_grad_norm_(...)": both(
        lambda code: clipping(f"optax.chain({code}(1.0), optax.sgd(0.1))"), None, norm
    ),
    "accelerator.save_state": save_and_restore,
    "accelerator.optimizer_step_was_skipped": was_skipped,
    "gradient_accumulation_steps=4": both(several, None),
    "tf32=True": tf32,
    'with torch.autocast("cuda", torch.float16): loss = loss_fn(...)': half,
    "torch.bfloat16": both(lambda code: half(code, "bf16"), None, skipping),
    "scaler = torch.amp.GradScaler()": optimizer,
    "init_scale=65536.0": loss_scale(2.0**16, 2000),
    "scaler.scale(loss).backward()": half_gradients,
    "scaler.unscale_(optimizer); clip_grad_norm_(...)": clipping,
    "scaler.step(optimizer); scaler.update()": update,
    "clip_grad_norm_": norm,
    "scaler.get_scale()": lambda code, skipped: close((written(code), written(skipped)), (SCALE, 0), rtol=0),
    "scaler.state_dict()": save_and_restore,
    "backward()": lambda code: several(f"precision.loss_scaled({code}(tx, 4), loss_scale)"),
    "torch.autocast(..., enabled=False)": lambda scope, code: kept(code, scope),
    'torch.set_float32_matmul_precision("high")': tf32,
    'jmp.get_policy("params=float32,compute=float16,output=float32")': policy,
    "jmp.DynamicLossScale(2.0**15)": loss_scale(2.0**15, 2000),
    "jmp.all_finite": optimizer,
    "DynamicScale(growth_interval=2000)": as_flax,
    "dynamic_scale.value_and_grad(loss_fn)(params)": train_state,
    "jnp.where(is_fin, new, old)": both(update, selection),
    'keras.mixed_precision.set_global_policy("mixed_float16")': both(half, None),
    "keras.optimizers.LossScaleOptimizer(optimizer)": optimizer,
    'layer.dtype_policy = "float32"': kept,
    "mpx.filter_value_and_grad(loss_fn, scaling)": lambda code: half_gradients(
        code, eqx=pytest.importorskip("equinox")
    ),
    "mpx.force_full_precision(jnp.mean, ...)": explained,
    "mpx.DynamicLossScaling(scale, minimum, factor, period)": loss_scale(2.0**9, 7, 4.0, 2.0**4),
}
# The flags of other libraries whose values a cell repeats, and our keys.
FLAGS = {
    "--lr": "optimizer.learning_rate",
    "--weight-decay": "optimizer.weight_decay",
    "--opt": "optimizer.name",
    "--sched": "schedule.name",
    "--epochs": "epochs",
    "--warmup-epochs": "schedule.warmup",
    "--model": "model.name",
    "--model-ema-decay": "ema_decay",
    "--smoothing": "label_smoothing",
    "--layer-decay": "optimizer.layer_decay",
    "--clip-grad": "optimizer.clip_norm",
    "--grad-accum-steps": "microbatches",
    "devices": "num_devices",
    "gradient_clip_val": "optimizer.clip_norm",
    "accumulate_grad_batches": "microbatches",
    "sync_batchnorm": "batch_norm.sync",
    "every_n_epochs": "checkpoint_every",
}
PRESETS = {
    "DIR --train-split train --val-split val": {"fp16"},
    "--pretrained": {"fp16"},
    "--amp --amp-dtype float16": {"fp16", "bf16"},
    "TrainingArguments(fp16=True)": {"fp16", "bf16"},
    "tf32=True": {"tf32"},
    'Trainer(precision="16-mixed")': {"fp16", "bf16", "fp32"},
    "--dtype=fp16": {"fp16", "fp16_rewrite"},
}
KEYS = {key.path: key.type for key in config.KEYS}
SOME = {int: "3", float: "0.5", object: "7", str: "x"}  # values of flags that are shown without one


def arguments_of(code):
    """The command line of a cell's code."""
    words = shlex.split(f"--config=digits{code}" if code[0] == ":" else code.replace("STEP:COUNT", "100:5"))
    words = [word + SOME[KEYS.get(word[9:-1], str)] if word[-1] == "=" else word for word in words]
    return words if words[0].startswith("--config=") else ["--config=folder:fp16", *words]


def is_value(value, text):
    try:
        return value == float(text)
    except ValueError:
        return str(value).lower() == text.lower()


@pytest.mark.parametrize("name", ROWS)
def test_cell_does_what_its_row_says(name, capsys):
    cell, codes = ROWS[name]
    python = [code for code in codes if not code.startswith(("--", ":", "mixedres "))]
    if python:
        CASES[name](*python)
    presets = set()
    for code in set(codes) - set(python):
        if code.startswith("mixedres "):
            _, command, *flags = code.split()
            with contextlib.suppress(SystemExit):
                run_subcommand(["mixedres", command, "--help"])
            shown = capsys.readouterr().out
            assert command in shown and all(flag.rstrip("=") in shown for flag in flags)
            continue
        arguments = arguments_of(code)
        found = config.flatten(config.parse_flags(arguments).config)
        given = dict(word.removeprefix("--config.").split("=", 1) for word in arguments if "--config." in word)
        assert all(is_value(found[key], text) for key, text in given.items()), given
        theirs = {FLAGS.get(flag): text for flag, text in re.findall(r"([\w-]+)[ =]([\w.-]+)", cell)}
        assert all(is_value(found[key], text) for key, text in theirs.items() if key in given), theirs
        presets.add(found["precision.name"])
    assert name not in PRESETS or presets == PRESETS[name]


def test_flags_of_timm_together_are_timms_run():
    """The rate is timm's for any batch, and epochs are counted in its batches of 512."""
    cells = [
        code for name, (_, codes) in ROWS.items() if name.startswith(("-b ", "--opt", "--sched")) for code in codes
    ]
    synthetic = ["--config.data.name=synthetic", "--config.data.train_examples=5120", "--config.data.num_classes=9"]
    arguments = ["--config=folder:fp16", *synthetic, *(word for code in cells for word in code.split())]
    experiment = plan(config.parse_flags(arguments).config).experiment
    rates = np.float64([experiment.learning_rate(step) for step in (25, 50, 475, 900)])
    np.testing.assert_allclose(rates, [0.5e-3, 1e-3, 0.5e-3, 0], rtol=1e-5, atol=1e-12)
    assert experiment.batch_size == 512 and experiment.total_steps == 900


def test_every_case_has_a_row():
    assert CASES.keys() <= ROWS.keys() and len(ROWS) > 80


def test_loss_scales_of_the_text_have_the_numbers_of_the_code():
    scales = [eval(f"precision.{code}") for code in re.findall(r"`(\w+LossScale\([^`]*\))`", PAGE)]
    assert [float(scale.loss_scale) for scale in scales] == [1, 128, 2**15]
    jax.tree.map(np.testing.assert_array_equal, scales[-1], precision.DynamicLossScale())


def test_forms_of_autocast_do_what_their_lines_say():
    """The dtypes of a product's result and of tanh for each line; the fourth has no half at all."""

    def fn(params):
        with jax.named_scope("head"):
            return loss_fn({"w": jnp.tanh(BATCH[:4] @ params["w"])})

    block = re.search(r"```text\n(jax.*?)```", (ROOT / "docs" / "autocast.md").read_text(), re.DOTALL)[1]
    dtypes = ("f16 f16", "f16 f16", "bf16 bf16", "f32 f32", "f32 f32", "f16 f32", "f16 f16")
    for number, (line, expected) in enumerate(zip(block.splitlines(), dtypes, strict=True)):
        names = {"jax": jax, "autocast": autocast, "fn": fn, "loss": fn, "train_step": fn}
        jaxpr = str(jax.make_jaxpr(eval(line.split("  ")[0], names))(PARAMS))
        found = [re.search(rf":(\w+)\[4,3\] = {name}", jaxpr)[1] for name in ("dot_general", "tanh")]
        assert " ".join(found) == expected and ("f16" in jaxpr) == (number != 3), line
