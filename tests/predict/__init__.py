"""Tests of predictions for files and arrays, and of their pages."""

import argparse

from mixedres import predict
from tests import run_command


def chosen(source, *options):
    """The classifier that a command makes of --from and other options."""
    parser = argparse.ArgumentParser()
    predict.add_arguments(parser)
    return predict.read_classifier(parser.parse_args([f"--from={source}", *options]))


def said(capsys, *arguments):
    """(status, lines of stdout, stderr)."""
    status = run_command("predict", *arguments)
    captured = capsys.readouterr()
    return status, captured.out.splitlines(), captured.err
