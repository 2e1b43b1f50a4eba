"""Which rank are the others waiting for? On many ranks, one that makes no progress ends the run instead of blocking it forever.

Every rank notes what it is about to do (``World.at``). A thread sends that note about once a second, with a pulse that counts
up, to the store through which the ranks found each other. If a note is older than ``--timeout`` seconds, the thread reads the
notes of all ranks and names the late one:

    no pulse          its process is stopped or dead, or its machine or network is down
    the oldest note   it has not reached the collective in which the others wait: slow data, a slow disk, a bug

Then every rank writes its stacks to RUN/stacks-rank-NNNNN.txt and ends at once, with exit status 75 (sysexits: try again).
Nothing is saved; the last complete checkpoint is there, and one that is incomplete is not used. ``who_ended`` answers the same
question after a connection was closed.
"""

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from ..files import printable
from .checkpoint import newest

__all__ = ["EXIT", "Watchdog"]

EXIT = 75
MISSED = 4  # pulses in a row that a living rank may miss
FOLLOWS, WHO = "another rank has ended", "see that rank's error"
_STATES = {
    "T": "is stopped",
    "t": "is stopped by a debugger",
    "Z": "was killed or has crashed",
    "": "was killed or has crashed",
}


@dataclass
class Note:
    """What a rank is doing."""

    pid: int
    host: str
    pulse: int = 0
    count: int = 0  # of its notes: equal on ranks that have made the same progress
    doing: str = "start"
    seconds: float = 0.0  # since when
    line: str = ""  # of our code
    waits: bool = False  # in a collective
    ended: str = ""  # why it has left

    def __str__(self) -> str:
        return f"'{self.doing}' ({self.line}) for {self.seconds:.0f} s"


class Watchdog:
    """One thread exchanges notes with the other ranks; a second one judges, because the first may block in the store."""

    def __init__(self, rank: int, size: int, timeout: float, folder: Path):
        self.rank, self.timeout, self.folder = rank, timeout, folder
        self.interval = min(1.0, timeout / 10)
        self.note, self.since = Note(os.getpid(), socket.gethostname()), time.monotonic()
        self.closed, self.verdict, self.published = threading.Event(), "", False
        self.dying = self.asking = False  # ``asking``: read all notes at every pulse, not one in turn
        name = [os.urandom(8).hex()]  # a store may outlive a run: torchrun keeps one through restarts
        dist.broadcast_object_list(name)
        patience, address = timedelta(seconds=max(10.0, timeout)), os.environ["MASTER_ADDR"]
        store = dist.TCPStore(address, int(os.environ["MASTER_PORT"]), is_master=False, timeout=patience)
        self.store = dist.PrefixStore(f"ngpt-{name[0]}", store)  # a separate connection: training may block in the other
        self._send()
        dist.barrier()  # every note is there
        self.notes: dict[int, Note] = {}
        self._read([r for r in range(size) if r != rank])
        self.heard = dict.fromkeys(self.notes, 0.0)  # when a rank's pulse was seen to change, or we began to ask
        self.answered = time.monotonic()  # when the store last did
        for work in (self._exchange, self._judge):
            threading.Thread(target=work, daemon=True).start()

    # ---- this rank ---------------------------------------------------------------------------------------------------
    def at(self, doing: str) -> None:
        """Note what this rank is about to do. All ranks note the same, in the same order."""
        self.note.count += 1
        self.note.doing, self.since = doing, time.monotonic()

    def close(self, why: str = "") -> None:
        """This rank leaves: it has finished, or ``why`` is its error."""
        self.closed.set()
        self.note.ended = why or "it has finished"
        with contextlib.suppress(RuntimeError):  # the store is already gone
            self._send()

    def _send(self) -> None:
        note = self.note
        note.pulse += 1
        note.seconds = time.monotonic() - self.since
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        path = frame.f_code.co_filename.replace("\\", "/") if frame else ""
        note.waits = "torch/distributed/" in path and "torch/distributed/checkpoint/" not in path
        while frame is not None and "ngpt_core" not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is not None:
            note.line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        self.store.set(str(self.rank), json.dumps(asdict(note)))

    # ---- the others --------------------------------------------------------------------------------------------------
    def _read(self, ranks: list[int]) -> None:
        for rank, text in zip(ranks, self.store.multi_get(list(map(str, ranks)))):
            note, old = Note(**json.loads(text)), self.notes.get(rank)
            if old is not None and note.pulse != old.pulse:
                self.heard[rank] = time.monotonic()
            self.notes[rank] = note

    def _exchange(self) -> None:
        """A thread: this rank's note to the store, and the others' from it."""
        ranks, turn = list(self.notes), 0
        with contextlib.suppress(RuntimeError):  # the store is gone: ``_judge`` notices
            while not self.closed.wait(self.interval):
                self._send()
                asking, turn = self.dying or self._stuck > self.timeout / 2, turn + 1
                if asking and not self.asking:
                    self.heard = dict.fromkeys(ranks, time.monotonic())
                self._read(ranks if asking else [ranks[turn % len(ranks)]])
                self.asking = asking
                if self.verdict and not self.published:
                    self.store.set("verdict", self.verdict)
                    self.published = True
                elif not self.verdict and self.store.check(["verdict"]):
                    self.verdict, self.published = self.store.get("verdict").decode(), True
                self.answered = time.monotonic()

    @property
    def _stuck(self) -> float:
        """Seconds since this rank's last note."""
        return time.monotonic() - self.since

    def _judge(self) -> None:
        """A thread: ends the process if a rank is late, or if this one was stopped for so long that the others are gone."""
        awake = time.monotonic()
        while not self.closed.wait(self.interval):
            slept, awake = time.monotonic() - awake, time.monotonic()
            if slept > self.timeout:
                self._end(
                    f"the process of rank {self.rank} was stopped for {slept:.0f} s, and the others do not wait that long"
                )
            elif self.verdict:
                self._end(self.verdict)
            elif self._stuck > self.timeout:
                self._end(self._late())

    def _late(self) -> str:
        """Which rank is late, and what all of them do."""
        self.note.seconds = self._stuck
        now, notes = time.monotonic(), {**self.notes, self.rank: self.note}
        if now - self.answered > MISSED * self.interval + 1:
            who = (
                "rank 0 or torchrun, where the ranks' store is, does not answer: it is stopped or dead, or the network is down"
            )
            return f"{self._state(0) or who}; rank {self.rank} is at {self.note}"
        silent = [r for r in self.notes if now - self.heard[r] > MISSED * self.interval or notes[r].ended]
        least = min(note.count for note in notes.values())
        behind = [r for r, note in notes.items() if note.count == least]
        if silent:
            text = ", ".join(self._state(r) or f"rank {r} does not respond, last seen at {notes[r]}" for r in silent)
        elif late := [r for r in behind if not notes[r].waits] or (behind if len(behind) < len(notes) else []):
            text = ", ".join(f"rank {r} is late: at {notes[r]}" for r in late)
        else:
            silent, text = list(notes), "all ranks wait in a collective: is the network down?"
        rest = "; ".join(f"rank {r} at {note}" for r, note in sorted(notes.items()) if f"rank {r} " not in text)
        return f"{text}. Waiting: {rest}" if rest else text

    def _state(self, rank: int) -> str:
        """What is known about a rank that does not answer; "" if it seems to live."""
        note = self.notes.get(rank, self.note)
        if note.ended:
            return "" if note.ended.startswith(FOLLOWS) else f"rank {rank} has ended ({note.ended})"
        state = ""
        if note.host == self.note.host and os.path.isdir("/proc/self"):
            with contextlib.suppress(OSError), open(f"/proc/{note.pid}/stat") as file:
                state = file.read().rpartition(")")[2].split()[0]
            if state in _STATES:
                return f"rank {rank} (process {note.pid} on {note.host}) {_STATES[state]}, last seen at '{note.doing}'"
        return ""

    def who_ended(self) -> str:
        """After a connection was closed: the rank that has ended, and what it was doing."""
        self.dying, begin = True, time.monotonic()
        while time.monotonic() - begin < (MISSED + 2) * self.interval:
            for rank in self.notes:
                if text := self._state(rank):
                    return f"{text}; this rank is at '{self.note.doing}'"
                if self.asking and time.monotonic() - self.heard[rank] > MISSED * self.interval:
                    return f"rank {rank} does not respond, last seen at {self.notes[rank]}"
            time.sleep(self.interval / 4)
        return WHO

    def _end(self, verdict: str) -> None:
        """Write stacks and the verdict, let the others read it, and end without saving anything."""
        self.verdict = verdict
        stacks, last = self.folder / f"stacks-rank-{self.rank:05d}.txt", newest(self.folder)
        action = f"continue from {last} with --resume" if last else "start the run again"
        text = f"ngpt: rank {self.rank} ends, {self._stuck:.0f} s after its last progress: {verdict}. Stacks: {stacks}."
        text = printable(f"{text} To go on, {action}.")
        with contextlib.suppress(OSError, ValueError), open(stacks, "w") as file:
            print(text, file=file, flush=True)
            faulthandler.dump_traceback(file)
        with contextlib.suppress(OSError, ValueError):
            print(f"\n{text}", file=sys.stderr, flush=True)
        self.closed.wait(MISSED * self.interval)  # ``_exchange`` publishes the verdict; the store may end with this process
        os._exit(EXIT)
