"""How do two ranks end when one of them is killed, stopped, slow, or asked to end? Real gloo processes."""

from collections.abc import Iterator
from pathlib import Path

import test_watchdog as watchdog
from runs import new_run, sentences

from ngpt_core.data.packing import pack
from ngpt_core.data.tokenizers import ByteTokenizer
from ngpt_core.train.loop import train

FAULTS = [  # (fault, place, rank)
    ("kill", "data", 1), ("kill", "data", 0), ("kill", "save", 1), ("kill", "save", 0), ("kill", "disk", 0),
    ("term", "data", 1), ("term", "save", 0), ("stop", "data", 1), ("stop", "data", 0), ("stop", "save", 1),
    ("sleep", "data", 0), ("sleep", "disk", 0), ("sleep", "save", 1),
]  # fmt: skip


def ranks(folder: Path) -> Iterator[tuple[str, str]]:
    """(what, outcome): every rank ends by itself, with a status that is not 0, and the resumed run ends as if undisturbed."""
    pack(sentences(200), folder / "corpus", ByteTokenizer(), val_fraction=0.1)
    train(new_run(str(folder / "corpus"), folder / "straight", steps=watchdog.STEPS))
    for fault, place, bad in FAULTS:
        out = folder / f"{fault}-{place}-{bad}"
        run = new_run(str(folder / "corpus"), out, steps=watchdog.STEPS, save_every=2, timeout=watchdog.TIMEOUT)
        codes, errors = watchdog.play(2, run, fault, place, bad)
        what = f"{fault}, {place}, rank {bad}: {codes}"
        if None in codes or 0 in codes:
            yield what, "silent"
        elif any("Traceback" in error for error in errors):
            yield what, "traceback"
        try:
            watchdog.goes_on(2, run, folder / "straight")
        except AssertionError:
            yield what, "lost"
        except Exception as error:  # from a rank's process
            yield f"{what}, {error}", "unrestartable"
        else:
            yield what, "restarted"
