"""Prediction of images with the loop of `mixedres.predict`, as `experiments.input --prediction --torch` times it.

python -m experiments.pipelines.our_prediction FOLDER WEIGHTS --dtype=bf16 --count=256

Prints the CPU time per image from the second batch on, and the probabilities of the first image. Threads decode as many
images ahead at the end of the measurement as at its start. The loop gets 1,000 images or more, as prediction decides by
their pixels whether to use oneDNN.
"""

import argparse
import itertools
import json
import pathlib
import time

from mixedres.predict import add_arguments, read_classifier
from mixedres.predict.inference import default_batch_size, predictions, prepare


def main() -> None:
    """Times one process and prints the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("weights")
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--count", type=int, required=True)
    options = parser.parse_args()
    prediction_parser = argparse.ArgumentParser()
    add_arguments(prediction_parser)
    given = [f"--from={options.weights}", f"--precision={options.dtype}", "--preprocessing=torch", "--image_size=224"]
    classifier = read_classifier(prediction_parser.parse_args(given))
    files = sorted(map(str, options.folder.rglob("*.jpg")))[: options.count]
    files *= 1000 // len(files) + 1
    found = predictions(prepare(classifier, len(files)), files, len(classifier.class_names))
    (first, _), *_ = itertools.islice(found, default_batch_size())
    wall, cpu = time.perf_counter(), time.process_time()
    count = sum(1 for _ in itertools.islice(found, options.count))
    result = {
        "cpu_ms_per_image": 1e3 * (time.process_time() - cpu) / count,
        "ms_per_image": 1e3 * (time.perf_counter() - wall) / count,
        "probabilities": [probability for _, probability in sorted(first.top)],
    }
    print("RESULT " + json.dumps(result), flush=True)
    found.close()


if __name__ == "__main__":
    main()
