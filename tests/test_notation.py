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


MECHANISMS = {
    "the residual step": "step",
    "the eigen learning rates": "alpha",
    "a scale in its units, s_eff": "Scale",
    "scaling of queries and keys": "s_qk",
    "scaling of the MLP": "s_u",
    "scaling of Mamba's input": "s_mamba",
    "scaling of the MoE's input": "s_moe",
    "LGP": "logit_scale",
    "LGP's backward scales": "backward_scale",
    "logarithmic decay": "log_decay",
    "Algorithm 1": "update",
    "the gate": "gate",
    "Pre-Moment Tangent Projection": "tangent",
    "Angular Step Cap": "cap_angle",
    "Second-Moment Growth Clipping": "growth_clip",
    "Post-Moment Exploration Noise": "signs",
}


@pytest.mark.parametrize("name", MECHANISMS.values(), ids=MECHANISMS)
def test_every_mechanism_of_the_paper_has_a_row(name):
    assert any(f"`{name}`" in row[2] for row in ROWS)


def test_every_labeled_equation_line_and_appendix_of_the_paper_has_a_row():
    places = [row[4] for row in ROWS]
    for place in ("(sz)", "ATTNnew2", "MLPnew2", "qkscaling1", "qkscaling2", "mlpscaling1"):
        assert any(place in text for text in places), place
    for place in (
        "section 2.1",
        "section 2.2",
        "section 2.3",
        "section 3.1",
        "section 3.2",
        *(f"appendix {x}" for x in "ABCD"),
    ):
        assert any(place in text for text in places), place
    lines = {int(n) for text in places for found in re.findall(r"lines? ([\d and]+)", text) for n in re.findall(r"\d+", found)}
    assert lines == set(range(3, 11))  # of Algorithm 1; its first two start the loop
