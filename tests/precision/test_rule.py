"""The rule of the dynamic loss scale against plain Python, on drawn rules and verdicts."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mixedres.precision import DynamicLossScale
from tests.precision.test_loss_scale import scanned

STEPS = 48
# Not only powers of two: 3 and 1.5 make the division round.
FACTORS = (1.5, 2.0, 3.0, 16.0)


def reference(verdicts, loss_scale, period, factor, min_loss_scale, max_loss_scale):
    """The rule in plain Python: (scale, counter, consecutive, total) after every step."""
    scale, factor, low, high = (np.float32(x) for x in (loss_scale, factor, min_loss_scale, max_loss_scale))
    counter = consecutive = total = 0
    history = []
    for finite in verdicts:
        if not finite:
            scale, counter = max(scale / factor, low), 0
            consecutive, total = consecutive + 1, total + 1
        else:
            counter, consecutive = counter + 1, 0
            if counter == period:
                counter = 0
                if scale * factor <= high:
                    scale = scale * factor
        history.append((float(scale), counter, consecutive, total))
    return history


@st.composite
def rules(draw):
    """Keyword arguments of a DynamicLossScale whose floor and ceiling are within reach."""
    low = draw(st.floats(2.0**-10, 2.0**20, width=32))
    scale = low * draw(st.sampled_from((1.0, 1.25, 2.0, 1024.0)))
    high = scale * draw(st.sampled_from((1.0, 1.9, 2.0, 3.0, 2.0**12)))
    return {
        "loss_scale": float(np.float32(scale)),
        "period": draw(st.integers(1, 7)),
        "factor": draw(st.sampled_from(FACTORS)),
        "min_loss_scale": low,
        "max_loss_scale": max(float(np.float32(high)), float(np.float32(scale))),
    }


# Finite four times out of five, so that some runs of finite steps reach the period.
VERDICT = st.integers(0, 4).map(bool)


@settings(max_examples=25)
@given(rules(), st.lists(VERDICT, min_size=STEPS, max_size=STEPS))
def test_rule_in_a_compiled_loop(rule, verdicts):
    history = scanned(DynamicLossScale(**rule), np.array(verdicts))
    actual = [tuple(float(x) for x in row) for row in zip(*history, strict=True)]
    assert actual == reference(verdicts, **rule)
    low, high = np.float32(rule["min_loss_scale"]), np.float32(rule["max_loss_scale"])
    assert all(low <= scale <= high for scale, *_ in actual)
