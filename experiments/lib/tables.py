"""Tables of a report as files for papers and other programs: CSV and LaTeX."""

import csv
import io
import re

import tabulate

from mixedres._internal.cli import console

# Head and rows of a table, as texts.
Table = tuple[list[str], list[list[str]]]


def to_csv(table: Table) -> str:
    """Returns the table as CSV, with the byte order mark without which Excel does not read UTF-8."""
    head, rows = table
    text = io.StringIO()
    text.write("\ufeff")
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    return text.getvalue()


def to_latex(table: Table) -> str:
    """Returns the table as a tabular of LaTeX's package booktabs: texts on the left, numbers on the right."""
    head, *rows = [[console.printable(cell) for cell in row] for row in (table[0], *table[1])]
    align = ("left", *["right"] * (len(head) - 1))
    # If numbers were parsed, +1.00 would become 1.
    tabular = tabulate.tabulate(rows, head, tablefmt="latex_booktabs", disable_numparse=True, colalign=align)
    tabular = re.sub(r"(?<![\w.])-(?=\d)", "$-$", tabular.replace("±", "$\\pm$"))
    return "% needs \\usepackage{booktabs}\n" + tabular + "\n"
