"""The view `experiments.report --evidence` of a sweep: outcomes image by image, intervals over seeds and images."""
