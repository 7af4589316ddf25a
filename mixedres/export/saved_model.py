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

    'serving_default': images (n, *spec.shape) of spec.dtype; 'image_bytes': (n,) texts, JPEG or PNG files. Both return
    'probabilities' (n, classes) float32 and 'classes' (n,) int32.

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

    @tf.function(input_signature=[tf.TensorSpec((None, *spec.shape), spec.dtype, name="images")])
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
        decoded = tf.TensorSpec(spec.shape, spec.dtype)
        return from_images(tf.map_fn(lambda data: _square(data, spec), image_bytes, fn_output_signature=decoded))

    module = tf.Module()
    module.from_images, module.from_bytes = from_images, from_bytes
    tf.saved_model.save(module, folder, signatures={"serving_default": from_images, "image_bytes": from_bytes})


def _square(data: Any, spec: InputSpec) -> Any:
    """The central square of an encoded image, in TensorFlow's operations; see `mixedres.data.images.center_crop`."""
    import tensorflow as tf

    image = tf.io.decode_image(data, channels=spec.shape[2], expand_animations=False)
    image.set_shape((None, None, spec.shape[2]))
    height, width = tf.unstack(tf.shape(image)[:2])
    if spec.resize == "official":
        return _official_square(image, height, width, spec.shape[0])
    side = tf.maximum(1, tf.cast(tf.round(spec.crop_pct * tf.cast(tf.minimum(height, width), tf.float32)), tf.int32))
    part = tf.image.crop_to_bounding_box(image, (height - side) // 2, (width - side) // 2, side, side)
    areas = lambda: tf.image.resize(part, spec.shape[:2], "area")  # noqa: E731
    linear = lambda: tf.image.resize(part, spec.shape[:2], "bilinear")  # noqa: E731
    square = tf.cond(side > spec.shape[0], areas, linear) if spec.resize == "area" else linear()
    return tf.cast(tf.round(square), tf.uint8)


def _official_square(image: Any, height: Any, width: Any, size: int) -> Any:
    """The central square as TensorFlow's official ResNets make it; see `mixedres.data.images.tensorflow_resize`."""
    import tensorflow as tf

    ratio = float(round(size * 256 / 224)) / tf.cast(tf.minimum(height, width), tf.float32)
    sides = [tf.cast(tf.cast(side, tf.float32) * ratio, tf.int32) for side in (height, width)]
    resized = tf.compat.v1.image.resize(image, sides, "bilinear", align_corners=False)
    square = tf.image.crop_to_bounding_box(resized, (sides[0] - size) // 2, (sides[1] - size) // 2, size, size)
    return tf.ensure_shape(square, (size, size, image.shape[2]))
