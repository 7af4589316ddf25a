"""Writes data sets in the layout of TensorFlow Datasets, without TensorFlow: ``python -m mixedres.data.prepare -h``."""
