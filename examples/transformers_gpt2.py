"""transformers' Flax models: a small GPT-2 on a language with known entropy, in float32 and in float16.

    python examples/transformers_gpt2.py  # 20 seconds: losses, explain's summary, the doctor's advice

The model is a function of its parameters, model(tokens, params=params), and autocast takes a loss that calls it.
Weights, softmax, layer norms and loss stay float32. Words follow each other by a table of probabilities, so nothing is
downloaded, and the entropy is a lower bound of the loss. transformers 4 is the last version with Flax models.
"""

import jax
import numpy as np
import optax
from transformers import FlaxGPT2LMHeadModel, GPT2Config

from mixedres import autocast, explain, numerics, precision

WORDS, LENGTH, BATCH = 16, 16, 64
SIZES = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 2}
model = FlaxGPT2LMHeadModel(GPT2Config(**SIZES, bos_token_id=0, eos_token_id=0), seed=0)


def loss(params, tokens):
    """Returns the mean cross-entropy of the next word, in float32."""
    logits = model(tokens, params=params).logits[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def language(batches):
    """Returns random texts, (batches, b, length), and the entropy of the next word in nats."""
    random = np.random.default_rng(0)
    table = random.dirichlet(np.full(WORDS, 0.2), size=WORDS)
    often = np.linalg.matrix_power(table, 100)[0]  # how often each word occurs
    texts = random.choice(WORDS, size=(batches, BATCH, LENGTH), p=often)
    for i in range(1, LENGTH):
        drawn = random.random((batches, BATCH, 1))
        texts[..., i] = (drawn > table.cumsum(1)[texts[..., i - 1]]).sum(-1).clip(max=WORDS - 1)
    return texts.astype("int32"), float(-(often @ (table * np.log(table + 1e-30)).sum(1)))


def train(loss_fn, loss_scale, texts):
    """Trains in the precision of `loss_fn`; returns parameters and the mean loss of the last ten steps."""
    tx = precision.loss_scaled(optax.adam(3e-3), loss_scale)

    @jax.jit
    def step(params, state, tokens):
        value, grads = precision.value_and_grad(loss_fn)(state, params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params, state, losses = model.params, tx.init(model.params), []
    for tokens in texts:
        params, state, value = step(params, state, tokens)
        losses.append(value)
    return params, float(np.mean(losses[-10:]))


def main(steps: int = 100) -> dict:
    """Trains in float32 and in float16, and returns what it prints."""
    texts, entropy = language(steps)
    results = {"entropy": entropy}
    float16 = (autocast(loss), precision.DynamicLossScale())
    for name, changed in {"float32": (loss, precision.NoOpLossScale()), "float16": float16}.items():
        params, results[name] = train(*changed, texts)
        print(f"{name}: loss {results[name]:.3f}; the entropy of the language is {entropy:.3f}")
    results["explain"] = explain(loss)(params, texts[0]).summary()
    results["doctor"] = numerics.examine(loss, params, texts[0]).advice
    print(f"explain: {results['explain']}\ndoctor: {results['doctor']}")
    return results


if __name__ == "__main__":
    main()
