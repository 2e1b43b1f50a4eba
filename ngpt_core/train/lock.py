"""Who may train into a folder? One process at a time: two would overwrite each other's checkpoints and metrics.

The operating system's lock on the file ``.lock`` in the folder. The kernel releases it when the process ends, however it ends:
a file that a killed process left behind holds nobody back. Of many ranks the first one takes it.
"""

import contextlib
import os
import socket
import sys
from pathlib import Path
from typing import TextIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # a module that is not there has no type of its own

__all__ = ["LOCK", "Lock", "take"]

LOCK = ".lock"


class Lock:
    """A folder that is locked; ``close`` ends that."""

    def __init__(self, file: TextIO):
        self.file = file

    def close(self) -> None:
        """Remove the file while it is still locked: whoever waits at it sees that it is gone."""
        with contextlib.suppress(OSError):
            os.unlink(self.file.name)
        self.file.close()


def take(folder: Path) -> Lock:
    """Make the folder if need be, and lock it. ValueError if another process has it."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = open(folder / LOCK, "a+", encoding="utf-8")
        except OSError as error:
            reason = f"{error.strerror} ({error.filename})"
            raise ValueError(f"{folder} cannot be written to: {reason}. Choose another --out.") from None
        try:
            # A lock of the process and not of the open file: a worker that was forked and survives it does not keep it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            who = file.read().strip() or "another process"
            file.close()
            raise ValueError(f"{folder} is being trained by {who}: wait for it or stop it, or choose another --out.") from None
        except (OSError, AttributeError):
            print(f"ngpt: no locks on this file system: see that no other process trains into {folder}.", file=sys.stderr)
        if _same_file(file, folder / LOCK):
            break
        file.close()  # its owner has removed it between our two calls
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return Lock(file)


def _same_file(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False
