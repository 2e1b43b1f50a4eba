"""Which results does the book store? JSON files, each next to the script that makes it.

evidence.json   make_evidence.py   chapter 9: all runs of benchmarks/evidence, compared
foreign.json    make_foreign.py    chapter 12: a small Llama, trained in five ways
layouts.json    make_layouts.py    chapter 11: the planner's memory and step times of the ladder's layouts
lgp.json        make_lgp.py        chapter 3: s_z and gradient norms over a small run
rehearsal.json  make_rehearsal.py  chapter 11: simulated steps, before and after their counts were brought down
motion.json     make_motion.py     the training animations: snapshots of one run of GPT and one of nGPT
scaling.json    make_scaling.py    chapter 11: the simulated steps of benchmarks/cluster.py, up to 4,096 ranks
switches.json   make_switches.py   chapter 13: the small runs of benchmarks/switches.py
"""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def stored(name: str) -> Any:
    """The contents of ``name``.json."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
