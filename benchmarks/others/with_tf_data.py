"""tf.data, as "Better performance with the tf.data API" has it: batches before small maps, parallel maps, prefetch.

A setting is a number of parallel calls and threads, or `auto`, with `c` behind it where decoded photographs are cached.
Its tensors are handed out as arrays, which copies nothing; photographs with their channels first, as a view.
Source: https://www.tensorflow.org/guide/data_performance
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow as tf
from contract import BATCH, MEAN, MIDDLE, MNIST_MEAN, MNIST_STD, SIZE, STD, STRIDE, WINDOW, Source, main


class Arrays:
    """What a script expects of a loader: arrays, channels first."""

    def __init__(self, dataset: Any, setting: str) -> None:
        if not setting.startswith("auto"):
            options = tf.data.Options()
            options.threading.private_threadpool_size = int(setting.rstrip("c"))
            dataset = dataset.with_options(options)
        self.dataset = dataset.prefetch(tf.data.AUTOTUNE)

    def __iter__(self) -> Iterator[Any]:
        for x, y in self.dataset.as_numpy_iterator():
            yield (x.transpose(0, 3, 1, 2) if x.ndim == 4 else x), y


def calls(setting: str) -> int:
    return tf.data.AUTOTUNE if setting.startswith("auto") else int(setting.rstrip("c"))


def mnist(source: Source, setting: str) -> Arrays:
    def normalized(images: Any, labels: Any) -> Any:
        return (tf.cast(images, tf.float32)[..., None] / 255.0 - MNIST_MEAN) / MNIST_STD, labels

    dataset = tf.data.Dataset.from_tensor_slices(source.arrays).shuffle(len(source.arrays[0]))
    return Arrays(dataset.batch(BATCH["mnist"]).map(normalized, calls(setting)), setting)


def photographs(source: Source, setting: str) -> Arrays:
    def normalized(image: Any, label: Any) -> Any:
        return (image / 255.0 - MEAN) / STD, label

    def crop_of(shape: Any) -> Any:
        if source.still:
            return fixed(shape, source.still)
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            shape, tf.constant([0.0, 0.0, 1.0, 1.0], shape=[1, 1, 4]), min_object_covered=0.0,
            aspect_ratio_range=(3 / 4, 4 / 3), area_range=(0.08, 1.0), max_attempts=10,
            use_image_if_no_bounding_boxes=True,
        )  # fmt: skip
        return tf.concat([begin[:2], size[:2]], 0)

    def augmented(image: Any, label: Any) -> Any:
        if source.still != "decoded":
            image = tf.image.resize(image, [SIZE, SIZE], antialias=True)
        image = tf.cast(image, tf.float32)
        return normalized(image if source.still else tf.image.random_flip_left_right(image), label)

    def decoded_crop(path: Any, label: Any) -> Any:
        encoded = tf.io.read_file(path)
        box = crop_of(tf.io.extract_jpeg_shape(encoded))
        return augmented(tf.io.decode_and_crop_jpeg(encoded, box, channels=3), label)

    def decoded(path: Any, label: Any) -> Any:
        return tf.io.decode_jpeg(tf.io.read_file(path), channels=3), label

    def cropped(image: Any, label: Any) -> Any:
        box = crop_of(tf.shape(image))
        return augmented(tf.image.crop_to_bounding_box(image, box[0], box[1], box[2], box[3]), label)

    num = len(source.files)
    dataset = tf.data.Dataset.from_tensor_slices((list(source.files), list(range(num))))
    if setting.endswith("c"):
        dataset = dataset.map(decoded, calls(setting)).cache().shuffle(num).map(cropped, calls(setting))
    else:
        dataset = dataset.shuffle(num).map(decoded_crop, calls(setting))
    return Arrays(dataset.batch(BATCH["photographs"]), setting)


def fixed(shape: Any, still: str) -> Any:
    """Not of the script: what is compared where nothing is random."""
    height, width = shape[0], shape[1]
    if still == "decoded":
        return tf.stack([height // 2 - MIDDLE // 2, width // 2 - MIDDLE // 2, MIDDLE, MIDDLE])
    return tf.stack([height // 8, width // 8, height * 3 // 4, width * 3 // 4])


def tokens(source: Source, setting: str) -> Arrays:
    (text,) = source.arrays
    num = (len(text) - WINDOW - 1) // STRIDE
    constant = tf.constant(text.astype("int32"))
    inside = tf.range(WINDOW + 1)

    def windows(indices: Any) -> Any:
        found = tf.cast(tf.gather(constant, indices[:, None] * STRIDE + inside), tf.int64)
        return found[:, :-1], found[:, 1:]

    dataset = tf.data.Dataset.from_tensor_slices(tf.range(num)).shuffle(num)
    return Arrays(dataset.batch(BATCH["tokens"]).map(windows, calls(setting)), setting)


def tensors(source: Source, setting: str) -> Arrays:
    dataset = tf.data.Dataset.from_tensor_slices(source.arrays).shuffle(len(source.arrays[0]))
    return Arrays(dataset.batch(BATCH["tensors"]), setting)


if __name__ == "__main__":
    main("tf_data", {"mnist": mnist, "photographs": photographs, "tokens": tokens, "tensors": tensors})
