"""What did the simulator's counts change in the code for GPUs? Writes rehearsal.json, which chapter 11 prints.

    OMP_NUM_THREADS=1 python book/ngpt_book/data/make_rehearsal.py after      (about two minutes of one core)

"before" is commit e64b35c, the last one before the counts were brought down: run this file with PYTHONPATH at a checkout of it.
Each case is one optimizer step of one micro-batch per rank by ``ngpt simulate``, on H100 cards, with sequences of 8192 tokens
and documents of 2000 on average. "loss" is the memory in bytes that the loss of the 30B model needs for 8192 tokens, above its
inputs and their gradients.
"""

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

from ngpt_core.cli import main
from ngpt_core.nn.head import linear_cross_entropy
from ngpt_core.rehearsal import rehearse
from ngpt_core.tools.simulate.machine import Call, Machine
from ngpt_core.tools.simulate.meter import Meter
from ngpt_core.tools.simulate.storage import Memory
from ngpt_core.tools.simulate.values import Values

FILE = Path(__file__).with_name("rehearsal.json")
CASES = {
    "1B on 8": "--preset 1B --gpus 8 --batch-size 16 --micro-batch 2 --activation-checkpointing selective",
    "30B on 64": "--preset 30B --gpus 64 --batch-size 64 --micro-batch 1 --activation-checkpointing full",
}
CASES["30B on 64, experts on 8"] = CASES["30B on 64"] + " --expert-parallel 8"


def launched(self: Meter, call: Call, count: Callable = Meter.__call__) -> None:
    """The meter, without the questions about a tensor's device that it used to count as operators."""
    if call.func.namespace != "prim":
        count(self, call)


def step(flags: str) -> dict:
    """The figures of one simulated step."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        main(["simulate", *flags.split(), "--json", f"{folder}/step.json"])
        found = json.loads(Path(folder, "step.json").read_text())
    waits: dict[str, int] = {}
    for wait in found["host_waits"]:
        place = wait["where"].partition(":")[0]
        waits[place] = waits.get(place, 0) + wait["count"]
    messages = {f"{m['op']} {m['axis']}": [m["count"], m["bytes"]] for m in found["collectives"]}
    return {key: found[key] for key in ("peak_bytes", "flops", "operations")} | {"waits": waits, "messages": messages}


def loss() -> int:
    """The peak of the loss and its backward pass at V = 131072, T = 8192, d = 2688 in bfloat16."""
    N, V, d = 8192, 131072, 2688
    now = SimpleNamespace(kind=lambda: "loss", place=lambda: ("", "", ""), seconds=lambda: 0.0)
    machine, memory = Machine("cuda", Values("balanced")), Memory(512, now)
    with rehearse("cuda"), machine.running():
        h, W = (torch.empty(n, d, dtype=torch.bfloat16).requires_grad_() for n in (N, V))
        s_z, targets = torch.empty(V).requires_grad_(), torch.empty(N, dtype=torch.long)
        machine.observers[:] = [memory]
        linear_cross_entropy(h, W, targets, s_z, denominator=5.0).backward()
        machine.observers.clear()
    return memory.peak.bytes - sum(x.numel() * x.itemsize for x in (h, W, s_z))


if __name__ == "__main__":
    Meter.__call__ = launched
    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    found[sys.argv[1]] = {name: step(flags) for name, flags in CASES.items()} | {"loss": loss()}
    FILE.write_text(json.dumps(found, separators=(",", ":")) + "\n")
