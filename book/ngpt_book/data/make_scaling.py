"""Where does scaling stop? Writes scaling.json, which chapter 11 draws.

    python book/ngpt_book/data/make_scaling.py         (at once: it simulates nothing)

The steps are simulated by benchmarks/cluster.py; this copies a part of its results.
"""

import json
from pathlib import Path

FILE = Path(__file__).with_name("scaling.json")
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "cluster.json"


def scaling() -> dict:
    return json.loads(RESULTS.read_text(encoding="utf-8"))["scaling"]


if __name__ == "__main__":
    FILE.write_text(json.dumps(scaling(), separators=(",", ":")) + "\n", encoding="utf-8")
