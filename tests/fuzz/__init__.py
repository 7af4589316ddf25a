"""Hostile files of every format that a command reads: each must be accepted or refused in one line.

Small intact files are made (`corpus`) and mutated (`formats`): their bytes (`blind`), or the parts of the format with
lengths and checksums that are right again. What a command calls on such a file (`data_targets`, `run_targets`) reads
each mutant in a process of its own (`campaign`). A traceback, a second line, a control character, a printed warning, a
signal, more than 10 s or more than 2 GB of address space (beyond the imports if they include JAX) is a failure
(`judge`). A mutant is a function of the seed, the format, its number and, for files of a run, the run.
"""
