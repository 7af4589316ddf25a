"""Hostile files of every format that a command reads: each must be accepted or refused in one line.

Small intact files are made (`formats`) and mutated (`mutations`): their bytes, or the parts of the format with lengths
and checksums that are right again. A command reads each mutant in this process. A traceback, a second line, a control
character, a printed warning, more than 10 s or more than 2 GB of address space is a failure (`judge`). A mutant is a
function of the seed, the format, its number and the intact files.
"""
