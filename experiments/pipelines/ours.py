"""mixedres: files, read and decoded by Grain's threads or processes."""

from experiments.pipelines import measure
from mixedres import data


def main() -> None:
    """Measures one start."""
    options = measure.arguments()

    def start():
        source = data.load(
            "folder",
            dir=str(options.folder),
            image_size=measure.SIZE,
            batch_size=measure.BATCH,
            flip=True,
            threads=options.threads,
            workers=options.processes,
        )
        return source.train_batches(measure.BATCH, seed=0)

    measure.report(start, options.batches)


if __name__ == "__main__":
    main()
