"""The program that XLA compiles whole, beside its operations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixedres import numerics
from mixedres.numerics._compare import compiled

ROWS = np.ones((64, 4), np.float32)


def product(x):
    return (x @ jnp.ones((4, 4))).sum(0)


@pytest.mark.parametrize("of", ["value", "grad"])
@pytest.mark.parametrize("cured", [False, True])
def test_program_that_is_compiled_wrong_is_told(of, cured, monkeypatch):
    """As if XLA left out three of four summands; with the option that is asked for it does not."""
    run = compiled._run

    def wrong(program, options):
        return run(program, {}) if options and cured else [x / 4 for x in run(program, {})]

    monkeypatch.setattr(compiled, "_run", wrong)
    loss = product if of == "value" else lambda x: jnp.square(product(x)).sum() / 2
    report = numerics.compare(loss, ROWS, dtype="bf16", of=of)
    assert not report.is_fine and not report.is_off
    assert report.verdict.startswith("XLA's compiled program differs from its operations: the result is off by 0.75")
    assert ("it is right" in report.verdict) == cured and "bfloat16 is fine" not in report.verdict


@pytest.mark.parametrize("dtype", [None, "bf16", "fp16"])
def test_fused_kernels_are_compared_with_their_operations(dtype):
    """The kernels that compute this wrong on CPUs are called by name, as long as they do; right programs are not."""
    wrong = not np.allclose(jax.jit(product)(np.ones((8192, 4), np.float32)), 32768)
    verdict = numerics.compare(product, np.ones((8192, 4), np.float32), dtype=dtype).verdict
    assert ("xla_cpu_experimental_ynn_fusion_type='' it is right" in verdict) == wrong
    right = numerics.compare(lambda x, w: jnp.tanh(x @ w).sum(0), ROWS, np.eye(4, dtype=np.float32), dtype=dtype)
    assert right.compiled == ()
