"""The advice after a step that is not finite."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from mixedres import precision, train
from mixedres.numerics import ArrayRecord, Finding
from mixedres.numerics._nonfinite import Origin


def findings(dtype):
    """Findings of a network that computes in this dtype."""
    dtype = np.dtype(dtype)
    largest = float(jnp.finfo(dtype).max)
    yield Finding((), (), None)
    for path, direction, primitive, size in (
        ("ResNet/head", "forward", "dot_general", largest / 2),
        ("ResNet", "backward", "convert_element_type", largest),
        ("ResNet/head", "forward", "div", 1.0),
        ("state/params/head", "forward", "", 1.0),
        ("batch/image", "forward", "", 1.0),
    ):
        row = ArrayRecord(path, direction, primitive, "", dtype, (2,), False, size)
        given = (ArrayRecord(path, direction, "add", "", dtype, (2,), True, size),)
        yield Finding((row,), ("loss",), Origin(row, given, (), (), 0))


@pytest.mark.parametrize("policy", [None, "params=float32,compute=float16,output=float32"], ids=["preset", "policy"])
@pytest.mark.parametrize("name", precision.PRESETS)
def test_advised_preset_is_wider_than_the_failed_one(name, policy):
    """Before, a step in bf16 got the advice to take a preset with bf16."""
    chosen = precision.get(name, policy=policy)
    dtype = jnp.dtype(chosen.policy.compute_dtype)
    at_minimum = precision.DynamicLossScale(1.0, min_loss_scale=1.0)
    scales = precision.NoOpLossScale(), precision.StaticLossScale(8.0), precision.DynamicLossScale(), at_minimum
    texts = [train.diagnosis.cause(found, chosen, scale) for found in findings(dtype) for scale in scales]
    advised = {
        found for text in texts for found in re.findall(r"config\.precision\.name=(\w+)|preset with (\w+)", text)
    }
    advised = {name for pair in advised for name in pair if name}
    assert advised == ({chosen.wider} - {name} if dtype == jnp.float16 else set())
    if dtype == jnp.float16:
        _, _, in_gradient, *_ = findings(dtype)
        mends = ("", "config.precision.loss_scale", "config.loss_scale.initial", "config.loss_scale.min")
        for mend, scale in zip(mends, scales, strict=True):
            assert mend in train.diagnosis.cause(in_gradient, chosen, scale)
    for text in texts:
        assert not re.search(r"; (,|or)|,,|  |, or $|; $", text), text
    overridden = dtype.name != precision.PRESETS[name].compute_dtype
    assert any("remove config.precision.policy" in text for text in texts) == overridden
