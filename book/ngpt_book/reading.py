"""How long does a chapter take, and which chapters does it build on? The numbers come from the notebooks themselves.

The short path is the text that is not folded away, up to the exercises, and the figures. Everything is also the folds, the code
and the exercises. The rates below are what the book's own cold readings took.
"""

import json
import math
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

import yaml

from .theme import COLORS, FONT

BOOK = Path(__file__).parents[1]
WORDS, FIGURE, QUESTION, EQUATION, LINE, EXERCISE = 200, 1.0, 0.5, 0.25, 0.1, 4.0  # words per minute; minutes for one of each

# chapter -> (a short name, the chapters that it builds on, its row and column on the map)
CHAPTERS: dict[str, tuple[str, tuple[str, ...], tuple[int, int]]] = {
    "01_hypersphere": ("The sphere", (), (0, 0)),
    "05_gated_adamw": ("The gate", (), (0, 3)),
    "02_scaling": ("Scales", ("01_hypersphere",), (1, 0)),
    "04_log_decay": ("Decay", ("01_hypersphere",), (1, 2)),
    "06_geometry": ("Geometry", ("05_gated_adamw", "01_hypersphere"), (1, 3)),
    "03_lgp": ("LGP", ("02_scaling",), (2, 0)),
    "08_mamba2": ("Mamba-2", ("02_scaling",), (2, 1)),
    "08_experts": ("Experts", ("08_mamba2",), (3, 1)),
    "07_spikes_and_silence": ("Spikes", ("06_geometry",), (2, 3)),
    "09_whole_recipe": ("The recipe", ("08_experts", "03_lgp", "04_log_decay", "07_spikes_and_silence"), (4, 1)),
    "09_does_it_work": ("Evidence", ("09_whole_recipe",), (5, 0)),
    "09_scaling_down": ("Small runs", ("09_whole_recipe",), (5, 1)),
    "13_left_open": ("Left open", ("09_whole_recipe",), (5, 2)),
    "10_ladder": ("The ladder", ("09_does_it_work",), (6, 0)),
    "11_train_for_real": ("Training", ("09_scaling_down",), (6, 1)),
    "12_your_own_trainer": ("Your loop", ("09_whole_recipe",), (5, 3)),
}


def numbers(contents: Path = BOOK / "_toc.yml") -> dict[str, str]:
    """The number of each page of a chapter. The pages that belong to chapter 8 are 8.1, 8.2, ...

    >>> numbers()["08_experts"]
    '8.1'
    """
    (chapters,) = [part["chapters"] for part in yaml.safe_load(contents.read_text())["parts"] if part.get("numbered")]
    found = {}
    for n, chapter in enumerate(chapters, 1):
        found[chapter["file"]] = str(n)
        found |= {page["file"]: f"{n}.{i}" for i, page in enumerate(chapter.get("sections", ()), 1)}
    return found


_FOLD = re.compile(r"^(:{3,}|`{3,})\{(?:dropdown|solution)\}.*?^\1\s*$", re.S | re.M)
_FENCE = re.compile(r"^(:{3,}|`{3,})\{(?:literalinclude|math|book-map|image)\}.*?^\1\s*$", re.S | re.M)
_MARKUP = re.compile(r"\{[\w:-]+\}|<[^`>]*>(?=`)|\]\([^)]*\)|^:\w+:.*$|^[|: -]+$", re.M)
_INLINE = re.compile(r"\$[^$]+\$")  # a formula in a line is read as one word


def words(markdown: str) -> int:
    """The words of a text, without directives and links; a formula in a line is one word.

    >>> words("A *state* $h_f$ of [length one](x.md).")
    6
    """
    return len(re.findall(r"[\w'’]+", _MARKUP.sub(" ", _INLINE.sub(" formula ", _FENCE.sub(" ", markdown)))))


@dataclass(frozen=True)
class Minutes:
    """The time for a chapter: the short path, and everything."""

    short: int
    whole: int


def minutes(notebook: Path) -> Minutes:
    """The time for a notebook."""
    short, more, exercises = 0.0, 0.0, False
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source, tags = "".join(cell["source"]), cell["metadata"].get("tags", [])
        if cell["cell_type"] == "markdown":
            before, found, after = source.partition("## Exercises")
            for part, fresh in ((before, exercises), (after, True)):
                folded = "".join(match[0] for match in _FOLD.finditer(part))
                open_text = _FOLD.sub(" ", part)
                time = words(open_text) / WORDS + EQUATION * open_text.count("{math}\n")
                short, more = (short, more + time) if fresh else (short + time, more)
                more += words(folded) / WORDS + EQUATION * folded.count("{math}\n") + EXERCISE * part.count("{exercise}")
            exercises |= bool(found)
        elif "remove-cell" not in tags:
            shown = [output["data"] for output in cell["outputs"] if "text/html" in output.get("data", {})]
            drawn = bool(shown)
            if drawn and not exercises:
                short += QUESTION if "".join(shown[0]["text/plain"]).startswith("Prediction") else FIGURE
            elif not drawn:
                more += LINE * len(source.splitlines())
    return Minutes(max(1, round(short)), max(1, math.ceil(short + more)))


# ---- the map of the book ---------------------------------------------------------------------------------------------
WIDTH, BOX, ACROSS, DOWN, TOP = 480, (112, 46), 121, 70, 4


def the_map(times: dict[str, Minutes], numbers: dict[str, str], addresses: dict[str, str]) -> str:
    """The chapters as SVG: a line leads down from a chapter to those that build on it; each links to its page."""
    left, corner = (WIDTH - 3 * ACROSS - BOX[0]) / 2, {}
    for name, (_, _, (row, column)) in CHAPTERS.items():
        corner[name] = left + ACROSS * column, TOP + DOWN * row
    lines, boxes = [], []
    for name, (title, needs, _) in CHAPTERS.items():
        x, y = corner[name]
        for i, other in enumerate(needs):  # the second line into a box comes in beside the first
            (a, b), end = corner[other], x + BOX[0] / 2 - (30 * i if y == TOP + DOWN else 0)
            lines.append(f"M{a + BOX[0] / 2:g},{b + BOX[1]}V{y - 12}H{end:g}V{y}")
        time = times[name]
        boxes.append(
            f'<a href="{escape(addresses[name])}"><rect x="{x:g}" y="{y}" width="{BOX[0]}" height="{BOX[1]}" rx="5" '
            f'fill="{COLORS["blue"]}" fill-opacity=".13" stroke="{COLORS["blue"]}"/>'
            f'<text x="{x + BOX[0] / 2:g}" y="{y + 19}" font-weight="600">{numbers[name]} {escape(title)}</text>'
            f'<text x="{x + BOX[0] / 2:g}" y="{y + 37}">{time.short} / {time.whole} min</text></a>'
        )
    height = TOP + DOWN * (1 + max(place[0] for _, _, place in CHAPTERS.values())) - DOWN + BOX[1] + 4
    about = "A map of the chapters. Lines lead from a chapter down to those that build on it."
    return (
        f'<svg class="book-map" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'fill="currentColor" text-anchor="middle" font-size="13" font-family="{escape(FONT, quote=True)}" role="group" '
        f'aria-label="{about}"><path d="{"".join(lines)}" fill="none" stroke="currentColor" stroke-opacity=".45" '
        f'stroke-width="1.5"/>{"".join(boxes)}</svg>'
    )
