"""What do the evidence runs show? Writes evidence.json, which chapter 9 draws.

    python book/ngpt_book/data/make_evidence.py         (seconds: it trains nothing)

The runs, the study that made them and the analysis are in benchmarks/evidence; this script starts the analysis.
"""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    study = Path(__file__).parents[3] / "benchmarks" / "evidence"
    sys.path.insert(0, str(study))
    runpy.run_path(str(study / "analyse.py"), run_name="__main__")
