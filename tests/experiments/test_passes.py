"""Bytes counted by hand: on calls of which each is easily counted again, and against what XLA compiled."""

import json

import pytest

from experiments import aot, fused_ablation, passes
from experiments.lib import runs
from experiments.passes import Call
from mixedres import models, precision

CONVOLUTION = Call("conv_general_dilated", (100, 7), (50,))


def resnet(name):
    policy, norm_policy = precision.get("bf16").network_policies
    return models.create(name, num_classes=1000, policy=policy, norm_policy=norm_policy, fused=True)


@pytest.mark.parametrize(
    ("call", "moved"),
    [
        (CONVOLUTION, {"convolution": 2 * 2 * 157}),
        (Call("norm_relu", (50,), (50,)), {"reduction": 2 * 150, "elementwise": 2 * 250}),
        (Call("norm_add_relu", (50, 50), (50,)), {"reduction": 500, "elementwise": 600, "convolution": 100}),
        (Call("norms_add_relu", (50, 50), (50,)), {"reduction": 600, "elementwise": 800}),
        (Call("norm_relu_pool", (48,), (12,)), {"reduction": 192 + 36, "elementwise": 288 + 72}),
    ],
)
def test_the_bytes_of_a_call(call, moved):
    assert {kind: found for kind, found in passes.count([call], 0, 0).items() if found} == moved


def test_later_convolutions_have_a_third_pass_and_projections_add_to_the_gradient_of_a_block():
    made = [CONVOLUTION, CONVOLUTION, Call("norms_add_relu", (50, 50), (50,))]
    assert passes.count(made, 0, 0)["convolution"] == 2 * 157 * (2 + 3) + 2 * 100
    assert passes.count([], 10, 30)["elementwise"] == 220 + 90


@pytest.mark.parametrize(("name", "convolutions", "norms"), [("resnet50", 53, 49), ("resnet18", 20, 17)])
def test_all_of_a_network_is_found(name, convolutions, norms):
    """A projection's two norms are one call."""
    made, parameters = passes.calls(resnet(name), 2, 64)
    names = [call.name for call in made]
    assert names.count("conv_general_dilated") == convolutions and len(names) == convolutions + norms
    assert parameters == {"resnet50": 25_557_032, "resnet18": 11_689_512}[name]


def test_compiled_convolutions_move_what_was_counted():
    """And no compiled step less in all than what must be moved."""
    found = passes.bars("h200")
    counted, compiled = found["fused norms, counted"], found["fused norms, compiled"]
    assert compiled["convolution"] == pytest.approx(counted["convolution"], rel=1e-5)
    totals = {bar: sum(moved.values()) for bar, moved in found.items()}
    assert totals["fused norms, counted"] <= totals["fused norms, compiled"] < totals["plain norms, compiled"]


def test_results_that_are_not_there_are_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runs, "RESULTS", tmp_path)
    assert passes.main([]) == 2
    assert "python -m experiments.aot --gpu=h200 writes it" in capsys.readouterr().err
    (tmp_path / "aot_h200.json").write_text(json.dumps({"rows": []}))
    assert passes.main([]) == 2
    assert "lacks bf16, batch 256" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["aot_h200.json"]


def test_the_table_of_what_each_construct_is_worth_is_that_of_the_file():
    rows = json.loads((runs.RESULTS / "fused_ablation.json").read_text())["rows"]
    whole, *without = [row for row in rows if row["batch"] == 32]
    assert all(whole["mb_per_image"] < row["mb_per_image"] for row in without)  # each is worth something
    text = (runs.RESULTS.parents[1] / "docs" / "performance.md").read_text()
    assert "\n".join(fused_ablation.table(rows)) in text


def test_what_is_committed_is_within_the_limits():
    """The figures in experiments/results, by the limits that `python -m experiments.aot --check` holds others to."""
    rows = json.loads((runs.RESULTS / "aot_h200.json").read_text())["rows"]
    found = {(row["preset"], row["batch"], row["form"]): row for row in rows}
    for case, most in aot.limited(aot.LIMITS):
        assert aot.passed(found[case.preset, case.batch, case.form], most) == []
