"""What do the switches that the paper leaves open do in small runs? Writes switches.json, which chapter 13 draws.

python benchmarks/switches.py                            (some minutes; finished runs are not repeated)
python book/ngpt_book/data/make_switches.py              (at once: it takes over the results)
"""

import json
from pathlib import Path

if __name__ == "__main__":
    out = Path(__file__).with_name("switches.json")
    found = json.loads((Path(__file__).parents[3] / "benchmarks" / "results" / "switches.json").read_text())
    out.write_text(
        json.dumps({key: found[key] for key in ("steps", "cost", "loss", "difference")}, separators=(",", ":")) + "\n"
    )
    print(f"wrote {out.name}")
