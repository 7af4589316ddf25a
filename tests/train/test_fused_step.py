"""Training steps with fused norms: the same as plain ones, over devices and microbatches; every overflow is seen."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

from experiments.lib import runs
from experiments.on_gpu import numerics, page, parts
from mixedres import models, precision, replay, train
from mixedres._internal.errors import ConfigError
from mixedres._internal.tree import fingerprint
from mixedres.config import unflatten
from mixedres.train.builder import FUSED_IS_FASTER
from tests import arrays
from tests.train import run_cases
from tests.train import step_cases as cases
from tests.train.run_cases import build

STAGES = (0, 1)  # a block with a projection


def test_network_with_frozen_statistics_is_not_fused():
    """Normalized by the running averages there is nothing to fuse, in training too."""
    jaxprs = []
    for fused in (False, True):
        train_step, state = cases.make(fused=fused, stages=(1,), frozen_statistics=True)
        jaxprs.append(re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(train_step)(state, cases.batch(0)))))
    assert jaxprs[0] == jaxprs[1]


def lies_as_ohwi(x):
    return x.format.layout.major_to_minor == models.kernel_layout.OHWI.major_to_minor


def _is_skipped(train_step, state, data):
    before = cases.host(state)
    after, metrics = train_step(state, data)
    bits = [arrays.bits((x.params, x.batch_stats, x.ema)) for x in (before, after)]
    same = bits[0] == bits[1]
    return metrics["grads_finite"] == 0 and same and after.loss_scale.consecutive_skipped == 1


def test_overflow_in_any_layer_skips_the_step():
    """With kernels in the order of cuDNN."""
    train_step, first = cases.make("fp16", fused=True, stages=STAGES, ohwi=True)
    assert lies_as_ohwi(first.params["stem_conv"]["kernel"])
    first = cases.host(first)
    leaves, structure = jax.tree.flatten(first.params)
    assert not _is_skipped(train_step, first, cases.batch(0))
    for index in range(len(leaves)):
        spoiled = [leaf.copy() for leaf in leaves]
        spoiled[index].reshape(-1)[0] = 1e30  # infinite in float16; a norm's multiplies a float32 map
        assert _is_skipped(train_step, dataclasses.replace(first, params=structure.unflatten(spoiled)), cases.batch(0))
    assert _is_skipped(train_step, first, cases.poisoned(0))


@pytest.mark.slow
def test_ohwi_kernels_change_no_number_of_a_run(tmp_path, monkeypatch):
    """Through evaluations, checkpoints, a resume, taps, and an average of the weights; files have no trace of it."""
    run_cases.shrink(monkeypatch, blocks=1)
    monkeypatch.setattr(train.Experiment, "has_ohwi_kernels", lambda experiment: experiment.is_fused)
    options = {"model__fused": "true", "ema_decay": 0.9, "numerics__every": 2}
    experiment = build(run_cases.tiny("fp32", **options))
    state = train.start.new_state(experiment)
    assert lies_as_ohwi(state.params["stem_conv"]["kernel"])
    assert lies_as_ohwi(state.ema["params"]["stem_conv"]["kernel"])
    assert state.params["head"]["kernel"].shape == (4, 10)
    stepped, _ = experiment.train_step()(
        state, experiment.shard_batch(next(iter(experiment.source.train_batches(16, seed=0, first_step=0))))
    )
    assert lies_as_ohwi(stepped.params["stem_conv"]["kernel"])
    assert fingerprint(state.params) == fingerprint(jax.jit(experiment.init_state)().params)

    for count in (4, 6):  # the second goes on from the checkpoint of the first
        whole = run_cases.fit(run_cases.tiny("fp32", **options, steps=count), tmp_path / "ohwi")
    monkeypatch.undo()
    run_cases.shrink(monkeypatch, blocks=1)
    plain = run_cases.fit(run_cases.tiny("fp32", **options), tmp_path / "plain")
    np.testing.assert_allclose(whole["eval"]["loss"], plain["eval"]["loss"], rtol=1e-5)
    assert whole["fused"] and plain["fused"]
    # And it goes on where kernels have the default layout.
    run_cases.fit(run_cases.tiny("fp32", **options, steps=8), tmp_path / "ohwi")


def test_auto_fuses_the_combinations_measured_as_faster():
    """Fused where it is faster on average over the benchmarks of a device and an arithmetic, and nowhere 5 % slower."""
    gains: dict[str, dict[str, list[float]]] = {}
    for path in runs.RESULTS.glob("*.json"):
        found = json.loads(path.read_text())
        if path.stem.startswith("benchmark_"):
            found = {"device": found["device"], "parts": {"steps_of_a_benchmark": found}}
        elif not path.stem.startswith("gpu_"):
            continue
        of_kind = gains.setdefault(found["device"]["kind"], {})
        for name, ratios in page.fused_gains(found).items():
            of_kind.setdefault(name, []).extend(ratios)
    assert "float16" in gains["cpu"]
    assert {kind: set(page.faster(of_kind)) for kind, of_kind in gains.items()} == {
        kind: set(names) for kind, names in FUSED_IS_FASTER.items()
    }


@pytest.mark.parametrize("faster_on", [{"cpu": ["float16"]}, {"NVIDIA H200": ["float16"]}], ids=str)
def test_auto_fuses_if_faster_and_possible(faster_on, monkeypatch):
    monkeypatch.setattr("mixedres.train.builder.FUSED_IS_FASTER", faster_on)
    assert build(run_cases.tiny("fp16")).model.fused == ("cpu" in faster_on)
    assert not build(run_cases.tiny("fp32")).model.fused
    for preset, options in (("fp16_rewrite", {}), ("bf16_rewrite", {}), ("fp16", {"batch_norm__frozen": "true"})):
        assert not build(run_cases.tiny(preset, **options)).model.fused
    assert build(run_cases.tiny("fp16", model__fused="true")).model.fused
    assert not build(run_cases.tiny("fp16", model__fused="false")).model.fused


def test_auto_fuses_rewritten_networks_with_onednn_and_default_rules(monkeypatch):
    """Short runs of a graph rewrite on CPUs keep the numbers of plain norms, and rules of one's own apply to norms."""
    monkeypatch.setattr("mixedres.train.builder.FUSED_IS_FASTER", {"cpu": ["float16 rewritten"]})
    monkeypatch.setattr(models.onednn, "is_faster", lambda dtype, pixels: pixels >= 500 * 16 * 8 * 8)
    monkeypatch.setattr(models.onednn, "_instructions", frozenset)

    def fused(preset, steps, **options):
        return build(run_cases.tiny(preset, steps=steps, **options)).model.fused

    assert fused("fp16_rewrite", 500) and not fused("fp16_rewrite", 499)
    assert fused("fp16_rewrite", 499, model__fused="true") and not fused("fp16_rewrite", 500, model__fused="false")
    assert not fused("fp16_rewrite", 500, batch_norm__frozen="true")
    assert not fused("bf16_rewrite", 500) and not fused("fp16", 500)
    for rule in ({"autocast__deny": "tanh"}, {"autocast__level": "allow_only"}, {"precision__keep_float32": "norm"}):
        assert not fused("fp16_rewrite", 500, **rule)
        with pytest.raises(ConfigError, match="do not apply inside fused norms"):
            fused("fp16_rewrite", 500, model__fused="true", **rule)


def test_precisions_of_a_fused_run_are_fused_if_possible():
    """What the doctor compares with, and what a replay takes."""
    experiment = build(run_cases.tiny("fp16", model__fused="true"))
    for preset in ("bf16", "fp16_rewrite", "fp32"):
        assert experiment.in_precision(precision.get(preset)).model.fused
        build(unflatten(replay.in_preset(experiment.resolved, preset)))
    half_norms = precision.get("fp16", norm_policy="params=float32,compute=float16,output=float16")
    assert not experiment.in_precision(half_norms).model.fused


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["fp16_rewrite", "bf16_rewrite"])
def test_fused_norms_of_a_rewritten_network_round_no_more_than_plain_ones(preset):
    """Fused norms read and write float32 there, and only the convolutions round."""
    keys = parts.TINY | numerics.SETTINGS
    base = parts.experiment("fp32", keys)
    variables = jax.device_get(train.start.new_state(base).variables)
    batch = next(iter(base.source.train_batches(base.batch_size, seed=0, first_step=0)))
    rows = numerics.gradients(base, variables, batch, keys, [preset])
    errors = {row["case"]: row["value"] for row in rows if row["check"] == "gradient against float64"}
    assert 1e-4 < errors[f"{preset}, fused"] < 1.1 * errors[f"{preset}, plain"]
