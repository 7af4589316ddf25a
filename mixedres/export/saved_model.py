"""An exported network as a SavedModel of TensorFlow.

TensorFlow's XLA runs the StableHLO of `jax.export` (XlaCallModule), so both programs compute the same.
"""

import pathlib
from typing import TYPE_CHECKING

import jax
import jax.export

from mixedres._internal import jax_compat
from mixedres.data import InputSpec
from mixedres.predict import Classifier

if TYPE_CHECKING:
    import tensorflow as tf

# Version of StableHLO. TensorFlow may read older versions only: TensorFlow 2.21 reads 1.13, and JAX 0.12 writes 1.18.
_STABLEHLO = "1.0.0"


def write_saved_model(folder: pathlib.Path, artifact: jax.export.Exported, classifier: Classifier) -> None:
    """Makes `folder`, a SavedModel with the signatures of TensorFlow's official ResNet.

    'serving_default' takes images (n, *spec.shape) of spec.image_dtype, 'image_bytes' (n,) strings, JPEG or PNG files.
    Both return 'probabilities' (n, classes) float32 and 'classes' (n,) int32.
    """
    import tensorflow as tf
    from tensorflow.compiler.tf2xla.python import xla

    spec, program = classifier.spec, jax_compat.portable_stablehlo(artifact.mlir_module_serialized, _STABLEHLO)
    # The order in which the program returns its results.
    names: dict[str, int] = jax.tree.unflatten(artifact.out_tree, range(2))
    shapes = {"probabilities": (None, len(classifier.class_names)), "classes": (None,)}
    dtypes = {"probabilities": tf.float32, "classes": tf.int32}
    ordered = sorted(names, key=names.__getitem__)

    @tf.function(input_signature=[tf.TensorSpec((None, *spec.shape), spec.image_dtype, name="images")])
    def from_images(images: "tf.Tensor") -> "dict[str, tf.Tensor]":
        returned = xla.call_module(
            [images],
            version=artifact.calling_convention_version,
            module=program,
            Tout=[dtypes[name] for name in ordered],
            Sout=[shapes[name] for name in ordered],
            platforms=[platform.upper() for platform in artifact.platforms],
        )
        return dict(zip(ordered, returned, strict=True))

    @tf.function(input_signature=[tf.TensorSpec((None,), tf.string, name="image_bytes")])
    def from_bytes(image_bytes: "tf.Tensor") -> "dict[str, tf.Tensor]":
        decoded = tf.TensorSpec(spec.shape, spec.image_dtype)
        return from_images(tf.map_fn(lambda data: _square(data, spec), image_bytes, fn_output_signature=decoded))

    module = tf.Module()
    module.from_images, module.from_bytes = from_images, from_bytes
    tf.saved_model.save(module, folder, signatures={"serving_default": from_images, "image_bytes": from_bytes})


def _square(data: "tf.Tensor", spec: InputSpec) -> "tf.Tensor":
    """Returns the central square of an encoded image; see `mixedres.data.images.crops.center_crop`."""
    import tensorflow as tf

    image = tf.io.decode_image(data, channels=spec.shape[2], expand_animations=False)
    image.set_shape((None, None, spec.shape[2]))
    if spec.resize == "official":
        return _official(image, spec)
    height, width = tf.unstack(tf.shape(image)[:2])
    side = tf.maximum(1, tf.cast(tf.round(spec.crop_pct * tf.cast(tf.minimum(height, width), tf.float32)), tf.int32))
    part = tf.image.crop_to_bounding_box(image, (height - side) // 2, (width - side) // 2, side, side)

    def resize(method: str) -> "tf.Tensor":
        return tf.image.resize(part, spec.shape[:2], method)

    shrinks = side > spec.shape[0] if spec.resize == "area" else tf.constant(False)
    square = tf.cond(shrinks, lambda: resize("area"), lambda: resize("bilinear"))
    return tf.cast(tf.round(square), tf.uint8)


def _official(image: "tf.Tensor", spec: InputSpec) -> "tf.Tensor":
    """Returns the central square of an image in float32, resized as in TensorFlow's official ResNet."""
    import tensorflow as tf

    size = spec.shape[0]
    sides = tf.cast(tf.shape(image)[:2], tf.float32)
    new = tf.cast(sides * (round(size / spec.crop_pct) / tf.reduce_min(sides)), tf.int32)
    new = tf.maximum(new, size)
    resized = tf.compat.v1.image.resize(image, new)
    return tf.slice(resized, tf.concat([(new - size) // 2, [0]], 0), spec.shape)
