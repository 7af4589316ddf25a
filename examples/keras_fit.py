"""Keras 3 on JAX, model.fit: a network with layer norm on scikit-learn's digits, in float32 and in float16.

    KERAS_BACKEND=jax python examples/keras_fit.py  # 15 seconds: accuracies, explain's summary, the doctor's advice

One line changes the model: fit, evaluate and predict all call stateless_call. fit needs an optimizer of Keras, so the
loss scale is Keras' own. When Keras skips a step, the weights do not change, but statistics of batch norm do. With
batch norm, use the loop of keras_loop.py.
"""

import keras
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from mixedres import autocast, explain, numerics


def network():
    """Images (b, 64) -> logits (b, 10)."""
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(128),
        keras.layers.LayerNormalization(),
        keras.layers.Activation("gelu"),
        keras.layers.Dense(10),
    ]
    return keras.Sequential([keras.Input((64,)), *layers])


def fit(model, optimizer, images, labels, epochs):
    """Compiles and trains the model, as in float32."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    model.fit(images, labels, batch_size=64, epochs=epochs, verbose=0)


def main(epochs: int = 8) -> dict:
    """Trains in float32 and in float16, and returns what it prints."""
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype("float32"), labels.astype("int32")
    images, test_images, labels, test_labels = train_test_split(images, labels, test_size=360, random_state=0)

    full = network()
    fit(full, keras.optimizers.Adam(3e-3), images, labels, epochs)

    half = network()
    half.stateless_call = autocast(half.stateless_call)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(3e-3), initial_scale=2.0**15)
    fit(half, optimizer, images, labels, epochs)

    results = {}
    for name, model in {"float32": full, "float16": half}.items():
        results[name] = model.evaluate(test_images, test_labels, verbose=0, return_dict=True)["accuracy"]
        print(f"{name}: {results[name]:.1%} of the test digits are right")

    # Keras' variables as a dict, so that the doctor's report has their names.
    params = {variable.path: variable.value for variable in full.trainable_variables}

    def loss(params, images, labels):
        in_order = [params[variable.path] for variable in full.trainable_variables]
        logits, _ = full.stateless_call(in_order, full.non_trainable_variables, images, training=True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    results["explain"] = explain(loss)(params, images[:64], labels[:64]).summary()
    results["doctor"] = numerics.examine(loss, params, images[:64], labels[:64]).advice
    print(f"explain: {results['explain']}\ndoctor: {results['doctor']}")
    return results


if __name__ == "__main__":
    main()
