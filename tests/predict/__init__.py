"""What the network of a run says of files."""

import argparse

from mixedres.predict import arguments, classifier


def chosen(source, *options):
    """The classifier that a command makes of --from and other options."""
    parser = argparse.ArgumentParser()
    arguments.add_arguments(parser)
    return classifier.read_classifier(parser.parse_args([f"--from={source}", *options]))
