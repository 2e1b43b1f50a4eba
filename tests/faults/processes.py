"""Do real processes end as the simulated ones? Killed by SIGKILL, stopped, out of disk, on one rank and on two.

A child is a fork of this process, which has imported everything: a case costs about two seconds. It is killed before one of its
calls to the file system (disk.py), or at a random time, also in the middle of a write. What is on the disk then is what the
operating system has, and, for the same call, what a power failure would have left of it.
"""

import contextlib
import errno
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cases
from disk import Recorder, restore

LIMITS = (0, 100, 400, 1000, 2000, 4000, 8000, 16_000, 32_000, 64_000, 128_000, 256_000)  # bytes that a file may have


class Killer(Recorder):
    """Kills this process before its call number ``at``, and writes what a power failure would leave to ``power``."""

    def __init__(self, folder: Path, graveyard: Path, power: Path, at: int):
        super().__init__(folder, graveyard)
        self.power, self.at = power, at

    def _before(self, what: str) -> None:
        self._tree()  # so that no inode is used twice
        self.at -= 1
        if not self.at:
            restore(self._power(), self.power)
            os.kill(os.getpid(), signal.SIGKILL)


def child(work: Callable[[], int | str]) -> int:
    """The pid of a fork that does the work. Its exit status is the work's, and 99 after an error that was not caught."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    status: int | str = 98
    with contextlib.suppress(BaseException):
        status = work()
    os._exit(99 if isinstance(status, str) else status)


def end_of(pid: int) -> int:
    """The exit status, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _train(place: cases.Place, folder: Path, *more: object) -> int | str:
    return cases.command(*place.train(folder / "run"), *more)[0]


# ---- killed ------------------------------------------------------------------------------------------------------------
def kills(place: cases.Place, every: int = 1, first: int = 1) -> Iterator[tuple[str, str]]:
    """(what, outcome): SIGKILL before each call to the file system of a run (or each ``every``-th), with and without power."""
    folder, graveyard, power = (place.folder / name for name in ("killed", "graveyard", "power"))
    for at in range(first, 10_000, every):
        folder.mkdir()

        def work(at: int = at) -> int | str:
            with Killer(folder, graveyard, power, at).active():
                return _train(place, folder)

        status = end_of(child(work))
        if status != -signal.SIGKILL:
            assert status == 0, status  # the run has ended: it makes fewer calls
            break
        shutil.rmtree(graveyard)
        for left in (folder, power):
            yield f"{left.name} before call {at}", cases.restarted(place, left)
    for left in (folder, graveyard, power):
        shutil.rmtree(left, ignore_errors=True)


def at_random(place: cases.Place, count: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """(what, outcome): SIGKILL or SIGTERM at a random time, half of them with --async-save, every third time again while the
    run is resumed."""
    pick, folder = random.Random(seed), place.folder / "random"
    begin = time.monotonic()
    assert end_of(child(lambda: _train(place, folder))) == 0
    whole = time.monotonic() - begin
    shutil.rmtree(folder)
    for i in range(count):
        number = signal.SIGTERM if i % 4 == 3 else signal.SIGKILL
        folder.mkdir()
        for more in [[], ["--resume"]][: 2 if i % 3 == 2 else 1]:
            flags = [*more, *(["--async-save"] if i % 2 else [])]
            pid = child(lambda flags=flags: _train(place, folder, *flags))  # type: ignore[misc]  # a lambda's default
            time.sleep(pick.random() * whole)
            os.kill(pid, number)
            status = end_of(pid)
            if status not in (0, -number, 143):
                yield f"{number.name}, status {status}", "traceback"
        yield f"{number.name}, {flags}", cases.restarted(place, folder)


# ---- disks -------------------------------------------------------------------------------------------------------------
def full(place: cases.Place) -> Iterator[tuple[str, str]]:
    """(what, outcome): no file may become larger than a limit, which is set when training begins; then the run goes on."""
    folder = place.folder / "full"
    for limit in LIMITS:
        folder.mkdir()

        def work(limit: int = limit) -> int | str:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            return _train(place, folder)

        status = end_of(child(work))
        if status == 99:
            yield f"a limit of {limit} bytes", "traceback"
        yield f"a limit of {limit} bytes", cases.restarted(place, folder)


class Failing(Recorder):
    """Call number ``at`` that changes the folder fails."""

    def __init__(self, folder: Path, at: int, code: int):
        self.folder, self.at, self.code, self.busy = folder, at, code, False
        self.contents, self.names = {}, {}

    def _before(self, what: str) -> None:
        about = what.partition(" ")[2]
        path = os.readlink(f"/proc/self/fd/{about}") if about.isdecimal() else about
        if path.startswith(str(self.folder)) and not path.endswith(".lock"):
            self.at -= 1
            if not self.at:
                raise OSError(self.code, os.strerror(self.code), path)


def failing(place: cases.Place, code: int, every: int = 1, first: int = 1) -> Iterator[tuple[str, str]]:
    """(what, outcome): each call to the file system fails once, with "no space left" or an input/output error."""
    folder = place.folder / "failing"
    for at in range(first, 10_000, every):
        folder.mkdir()
        failure = Failing(folder, at, code)
        with failure.active():
            status, text = cases.command(*place.train(folder / "run"))
        what = f"{errno.errorcode[code]} at call {at}"
        if isinstance(status, str):
            yield f"{what}: {status}", "traceback"
        elif status and not text.strip().splitlines()[-1].startswith("ngpt: "):
            yield f"{what}: {text[-200:]}", "silent"
        yield what, cases.restarted(place, folder)
        if failure.at > 0:  # the run has ended: it makes fewer calls
            break


def slow(place: cases.Place, seconds: float = 0.1) -> Iterator[tuple[str, str]]:
    """(what, outcome): a disk that takes a while for each fsync, with and without --async-save."""
    real, folder = os.fsync, place.folder / "slow"

    def fsync(handle: int) -> None:
        time.sleep(seconds)
        real(handle)

    for more in ([], ["--async-save"]):
        os.fsync = fsync
        try:
            status, _ = cases.command(*place.train(folder / "run"), *more)
        finally:
            os.fsync = real
        yield f"slow disk {more}", "unrestartable" if status else cases.restarted(place, folder)
