"""How much time do the seals cost? Hashes in GB/s, and the share of ``ngpt eval`` on a run of ``micro``.

    python benchmarks/seal.py        writes benchmarks/results/seal.json

The share is the time inside ``ngpt_core.seal.verify`` over the wall time of the whole command, which loads torch too.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "seal.json"
EVAL = """
import sys, time
begin = time.perf_counter()
from ngpt_core import seal
from ngpt_core.cli import main
spent, real = [0.0], seal.sha256
def timed(path):
    start = time.perf_counter()
    digest = real(path)
    spent[0] += time.perf_counter() - start
    return digest
seal.sha256 = timed
status = main(["eval", sys.argv[1], "--windows", "16"])
print(status, spent[0], time.perf_counter() - begin)
"""


def speeds(size: int = 1 << 27) -> dict[str, float]:
    """GB/s of hashlib's hashes: the best of three, in memory."""
    data, found = os.urandom(size), {}
    for name in ("sha256", "blake2b", "sha512", "sha3_256", "md5"):
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            hashlib.new(name, data).digest()
            times.append(time.perf_counter() - begin)
        found[name] = round(size / min(times) / 1e9, 3)
    return found


def share(repeats: int = 3) -> list[dict[str, float]]:
    """Seconds of hashing and of the whole command, for ``ngpt eval`` on a run of ``micro``."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder) / "run")
        small = "--steps 1 --batch-size 2 --seq-len 128 --eval-every 0 --sample-tokens 0 --eval-windows 2".split()
        train = [sys.executable, "-m", "ngpt_core", "train", "--preset", "micro", "--out", run, *small]
        subprocess.run(train, check=True, capture_output=True)
        for _ in range(repeats):
            done = subprocess.run([sys.executable, "-c", EVAL, run], check=True, capture_output=True, text=True)
            status, hashing, total = map(float, done.stdout.splitlines()[-1].split())
            assert status == 0
            found.append({"hashing": round(hashing, 4), "total": round(total, 2), "share": round(hashing / total, 5)})
    return found


if __name__ == "__main__":
    result = {"GB/s": speeds(), "ngpt eval on micro": share()}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
