"""Programs that feed the same batches by different means, each run in an environment of its own."""
