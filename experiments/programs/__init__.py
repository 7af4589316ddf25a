"""Training steps of networks that are no ResNet, at their real sizes, for `python -m experiments.aot --programs`."""
