"""Hostile files of every format that a command reads: each must be accepted or refused in one line.

Small intact files are made (`corpus`) and mutated: bytes of any file (`blind`), and the inside of each format with its
checksums and lengths right around it. Every mutant goes to what a command calls on such a file (`data_targets`,
`run_targets`), in a process of its own (`campaign`, `worker`). A traceback, a second line, a control character, a
printed warning, a signal, more than 10 s or more than 2 GB of address space (beyond the imports where they include JAX)
is a failure. A mutant is a function of the seed, the format, its number and, for files of a run, the run.
"""
