"""An exported network as a SavedModel of TensorFlow, which is imported here and nowhere else.

TensorFlow's own XLA runs the StableHLO of `jax.export` (XlaCallModule), so both compute the same.
"""

import pathlib
from typing import Any

import jax
import jax.export

from mixedres._internal import jax_compat
from mixedres.data import InputSpec
from mixedres.predict.classifier import Classifier

# The version of StableHLO; TensorFlow may know an older one than JAX: 2.21 knows 1.13, and JAX 0.12 writes 1.18.
_STABLEHLO = "1.0.0"


def write(folder: pathlib.Path, artifact: jax.export.Exported, network: Classifier) -> None:
    """Makes `folder`, a SavedModel with the signatures of the original.

    'serving_default': images (n, *spec.shape) of spec.image_dtype; 'image_bytes': (n,) texts, JPEG or PNG files. Both
    return 'probabilities' (n, classes) float32 and 'classes' (n,) int32.

    Args:
      folder: must not exist.
      artifact: of `mixedres.export.export.exported`.
      network: the exported network.

    Raises:
      OSError: where it cannot be written.
    """
    import tensorflow as tf
    from tensorflow.compiler.tf2xla.python import xla

    spec, program = network.spec, jax_compat.portable_stablehlo(artifact.mlir_module_serialized, _STABLEHLO)
    names = artifact.out_tree.unflatten(range(2))  # the order in which the program returns them
    shapes = {"probabilities": (None, len(network.class_names)), "classes": (None,)}
    dtypes = {"probabilities": tf.float32, "classes": tf.int32}
    ordered = sorted(names, key=names.get)

    @tf.function(input_signature=[tf.TensorSpec((None, *spec.shape), spec.image_dtype, name="images")])
    def from_images(images: Any) -> dict[str, Any]:
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
    def from_bytes(image_bytes: Any) -> dict[str, Any]:
        decoded = tf.TensorSpec(spec.shape, spec.image_dtype)
        return from_images(tf.map_fn(lambda data: _square(data, spec), image_bytes, fn_output_signature=decoded))

    module = tf.Module()
    module.from_images, module.from_bytes = from_images, from_bytes
    tf.saved_model.save(module, folder, signatures={"serving_default": from_images, "image_bytes": from_bytes})


def _square(data: Any, spec: InputSpec) -> Any:
    """The central square of an encoded image, in TensorFlow's operations; see `mixedres.data.images.center_crop`."""
    import tensorflow as tf

    image = tf.io.decode_image(data, channels=spec.shape[2], expand_animations=False)
    image.set_shape((None, None, spec.shape[2]))
    if spec.resize == "official":
        return _official(image, spec)
    height, width = tf.unstack(tf.shape(image)[:2])
    side = tf.maximum(1, tf.cast(tf.round(spec.crop_pct * tf.cast(tf.minimum(height, width), tf.float32)), tf.int32))
    part = tf.image.crop_to_bounding_box(image, (height - side) // 2, (width - side) // 2, side, side)
    areas = lambda: tf.image.resize(part, spec.shape[:2], "area")  # noqa: E731
    linear = lambda: tf.image.resize(part, spec.shape[:2], "bilinear")  # noqa: E731
    square = tf.cond(side > spec.shape[0], areas, linear) if spec.resize == "area" else linear()
    return tf.cast(tf.round(square), tf.uint8)


def _official(image: Any, spec: InputSpec) -> Any:
    """The central square as the official ResNet makes it; see `mixedres.data.images.official`."""
    import tensorflow as tf

    size = spec.shape[0]
    sides = tf.cast(tf.shape(image)[:2], tf.float32)
    new = tf.cast(sides * (round(size / spec.crop_pct) / tf.reduce_min(sides)), tf.int32)
    new = tf.maximum(new, size)
    resized = tf.compat.v1.image.resize(image, new)
    return tf.slice(resized, tf.concat([(new - size) // 2, [0]], 0), spec.shape)
