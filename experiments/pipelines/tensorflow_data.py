"""tf.data: TFRecord, decode_and_crop_jpeg, everything on AUTOTUNE. Runs where tensorflow-cpu is installed."""

from __future__ import annotations

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import measure
import tensorflow as tf


def write(folder, path) -> None:
    """The images as one TFRecord file."""
    files = sorted(folder.glob("train/*/*.jpg"))
    classes = sorted({file.parent.name for file in files})
    with tf.io.TFRecordWriter(str(path) + ".part") as writer:
        for file in files:
            image = tf.train.Feature(bytes_list=tf.train.BytesList(value=[file.read_bytes()]))
            label = tf.train.Feature(int64_list=tf.train.Int64List(value=[classes.index(file.parent.name)]))
            features = tf.train.Features(feature={"image": image, "label": label})
            writer.write(tf.train.Example(features=features).SerializeToString())
    os.replace(str(path) + ".part", path)


def example(record):
    """One random resized crop, flipped or not, as bytes."""
    features = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}
    parsed = tf.io.parse_single_example(record, features)
    begin, size, _ = tf.image.sample_distorted_bounding_box(
        tf.io.extract_jpeg_shape(parsed["image"]),
        tf.constant([0.0, 0.0, 1.0, 1.0], shape=[1, 1, 4]),
        min_object_covered=0.08,
        aspect_ratio_range=[3 / 4, 4 / 3],
        area_range=[0.08, 1.0],
        max_attempts=10,
        use_image_if_no_bounding_boxes=True,
    )
    window = tf.concat([begin[:2], size[:2]], 0)
    image = tf.image.decode_and_crop_jpeg(parsed["image"], window, channels=3)
    image = tf.image.random_flip_left_right(image)
    image = tf.image.resize(image, [measure.SIZE, measure.SIZE], method="bilinear")
    return tf.cast(image, tf.uint8), tf.cast(parsed["label"], tf.int32)


def main() -> None:
    """Measures one start; --threads=0 means as many as there are cores, as AUTOTUNE has it."""
    options = measure.arguments()
    path = options.folder.parent / "images.tfrecord"
    if not path.exists():
        write(options.folder, path)

    def start():
        dataset = tf.data.TFRecordDataset(str(path)).shuffle(2048).repeat()
        dataset = dataset.map(example, num_parallel_calls=tf.data.AUTOTUNE)
        dataset = dataset.batch(measure.BATCH, drop_remainder=True, num_parallel_calls=tf.data.AUTOTUNE)
        return dataset.prefetch(tf.data.AUTOTUNE).as_numpy_iterator()

    measure.report(start, options.batches)


if __name__ == "__main__":
    main()
