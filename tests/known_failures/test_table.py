"""The table of cases is complete, every test it names exists, and every case of sections A to F has a fault that it catches."""

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
TABLE = (HERE.parent.parent / "docs" / "known_failures_of_the_field.md").read_text()
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]] for line in TABLE.splitlines() if re.match(r"\| [A-L] \|", line)
]
IDS = """
01 03 05 06 07 09 10 11 13 14 17 18 20 22 23 25 26 27 28 29 31 32 34 35 37 39 40 42 44 45 47 48 50 51 53 55 56 57 58 59 61 63 64 66
68 69 70 71 73 74 76 78 79 80 82 83 84 85 86 88 90 91 93 95 96 98 99
""".split()


def functions_in(path):
    """Name -> node of every test function in a file, read and not imported."""
    tree = ast.parse(path.read_text())
    return {
        node.name: node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_every_case_stands_in_it_once():
    assert len(IDS) == 67
    assert [row[1] for row in ROWS] == [f"B{number}" for number in IDS]
    assert all(row[2] and row[3] and row[4] for row in ROWS)


def test_every_test_it_names_exists():
    named = [row[5].strip("`") for row in ROWS if row[5] != "–"]
    assert len(named) > 50
    for name in named:
        file, _, test = name.partition("::")
        assert test in functions_in(HERE / file), name


def test_every_case_that_is_tested_here_stands_in_it_and_has_a_fault():
    table = {row[1]: row[5] for row in ROWS}
    for path in sorted(HERE.glob("test_[a-l]_*.py")):
        for name, node in functions_in(path).items():
            if case := re.match(r"test_(b\d\d)_", name):
                assert table[case[1].upper()] == f"`{path.name}::{name}`"
                decorators = [
                    d.func.id for d in node.decorator_list if isinstance(d, ast.Call) and hasattr(d.func, "id")
                ]
                assert "faults" in decorators, f"{name}: which fault does it catch?"


def test_sections_a_to_f_are_answered():
    """By a test, or for the two that need a GPU or its memory by the reason."""
    open_cases = [row[1] for row in ROWS if row[0] in "ABCDEF" and row[5] == "–"]
    assert open_cases == ["B29", "B59"]
    assert all("waits for CUDA" in row[4] for row in ROWS if row[1] in open_cases)
