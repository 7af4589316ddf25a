"""What `experiments.fuzz` is made of: a corpus, mutations of each format, what reads them, and a judge."""
