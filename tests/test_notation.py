"""Does every row of the book's notation table lead to a name that exists?"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROWS = [
    [cell.strip() for cell in line.strip().strip("|").split(" | ")]
    for line in (ROOT / "book" / "notation.md").read_text().splitlines()
    if line.startswith("| ") and "`" in line
]


def test_the_table_was_read():
    assert len(ROWS) > 40 and all(len(row) == 5 for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[3]}:{row[2]}".replace("`", ""))
def test_the_name_stands_in_the_file(row):
    source = (ROOT / "ngpt_core" / row[3].strip("`")).read_text()
    for name in re.findall(r"`(\w+)`", row[2]):
        defined = rf'(def|class) {name}\b|\b{name}\b\s*[:=]|\.{name}\b|"{name}"'  # or the key of a group
        assert re.search(defined, source), f"{name} is not defined in {row[3]}"
    assert re.match(r"(eqs?\.|alg\.|section|appendix|figure) ", row[4]), "every row names its equation or section"
