"""Haiku; the half mode is its jmp policy: float32 parameters, half inside, norms in float32 with half results."""

import contextlib

import haiku as hk
import jax
import jax.numpy as jnp
import jmp

from tests.strangers.programs import cross_entropy, images, integers, normal, program, words

BATCH, TIME, SIZE, WORDS, CLASSES = 4, 16, 32, 64, 10
NORMS = (hk.LayerNorm, hk.BatchNorm)
LAYERS = (hk.Linear, hk.Embed, hk.Conv2D, hk.MultiHeadAttention, hk.LSTM, hk.GRU)


@contextlib.contextmanager
def policies(half):
    """All layers compute in `half`, and norms in float32."""
    layer, norm = jmp.Policy(jnp.float32, half, half), jmp.Policy(jnp.float32, jnp.float32, half)
    with contextlib.ExitStack() as stack:
        for kind in LAYERS:
            stack.enter_context(hk.mixed_precision.push_policy(kind, layer))
        for kind in NORMS:
            stack.enter_context(hk.mixed_precision.push_policy(kind, norm))
        yield


def network(function, *args):
    """A function of Haiku modules with state and dropout, its inputs and labels."""
    made = hk.transform_with_state(function)
    key = jax.random.key(0)
    params, state = jax.jit(made.init)(key, *args[:-1])

    def model(half):
        def of(params, state, key, *inputs):
            with policies(half) if half else contextlib.nullcontext():
                return made.apply(params, state, key, *inputs)[0]

        return of

    return program(model, cross_entropy, params, state, key, *args)


def transformer():
    """Two causal pre-norm blocks with tanh gelu and dropout."""

    def function(tokens):
        init = hk.initializers.VarianceScaling(1.0)
        x = hk.Embed(WORDS, SIZE)(tokens)
        x = x + hk.get_parameter("positions", (TIME, SIZE), init=hk.initializers.RandomNormal(0.02)).astype(x.dtype)
        mask = jnp.tril(jnp.ones((1, 1, TIME, TIME), bool))
        for _ in range(2):
            y = hk.LayerNorm(-1, True, True)(x)
            y = hk.MultiHeadAttention(4, SIZE // 4, w_init=init)(y, y, y, mask)
            x = x + hk.dropout(hk.next_rng_key(), 0.1, y)
            y = jax.nn.gelu(hk.Linear(2 * SIZE)(hk.LayerNorm(-1, True, True)(x)))
            x = x + hk.dropout(hk.next_rng_key(), 0.1, hk.Linear(SIZE)(y))
        return hk.Linear(WORDS)(hk.LayerNorm(-1, True, True)(x))

    return network(function, *words())


def recurrent(kind):
    """A recurrent core, dynamically unrolled, with a class at every step."""

    def function(x):
        core, head = kind(SIZE), hk.Linear(CLASSES)
        # The state must have the dtype that the core returns.
        half = hk.mixed_precision.get_policy(kind)
        start = core.initial_state(BATCH)
        start = half.cast_to_output(start) if half else start
        return head(hk.dynamic_unroll(core, x, start)[0])

    return network(function, normal(1, TIME, BATCH, SIZE), integers(2, CLASSES, TIME, BATCH))


def resnet():
    """The blocks of a small ResNet v1 in training."""

    def function(x):
        make = hk.nets.ResNet.BlockGroup
        x = jax.nn.relu(norm(hk.Conv2D(16, 3, with_bias=False)(x)))
        for channels, stride in ((16, 1), (32, 2)):
            options = {"resnet_v2": False, "bottleneck": False, "use_projection": stride > 1}
            x = make(channels, 1, stride, {"create_scale": True, "create_offset": True, "decay_rate": 0.9}, **options)(
                x, is_training=True, test_local_stats=False
            )
        return hk.Linear(CLASSES)(x.mean((1, 2)))

    def norm(x):
        return hk.BatchNorm(True, True, 0.9)(x, is_training=True)

    return network(function, *images(16, 16, 3))


PROGRAMS = {
    "Haiku transformer, dropout": transformer,
    "Haiku LSTM, dynamic_unroll": lambda: recurrent(hk.LSTM),
    "Haiku GRU, dynamic_unroll": lambda: recurrent(hk.GRU),
    "Haiku ResNet, training": resnet,
}
