"""Tests of predictions for files and arrays, and of their pages."""

import argparse

from mixedres.predict import arguments, classifier


def chosen(source, *options):
    """The classifier that a command makes of --from and other options."""
    parser = argparse.ArgumentParser()
    arguments.add_arguments(parser)
    return classifier.read_classifier(parser.parse_args([f"--from={source}", *options]))
