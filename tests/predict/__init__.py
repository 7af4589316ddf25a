"""Tests of predictions for files and arrays, and of their pages."""

import argparse

import tests
from mixedres import predict


def chosen(source, *options):
    """The classifier that a command makes of --from and other options."""
    parser = argparse.ArgumentParser()
    predict.add_arguments(parser)
    return predict.read_classifier(parser.parse_args([f"--from={source}", *options]))


def said(capsys, *arguments):
    """(status, lines of stdout, stderr)."""
    status, out, err = tests.said(capsys, "predict", *arguments)
    return status, out.splitlines(), err
