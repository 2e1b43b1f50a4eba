"""Who may train into a folder? One process at a time: two would overwrite each other's checkpoints and metrics.

The operating system's lock on the file ``.lock`` in the folder. The kernel releases it when the process ends, however it ends:
a file that a killed process left behind holds nobody back. Of many ranks the first one takes it.
"""

import os
import socket
import sys
from pathlib import Path
from typing import TextIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

__all__ = ["LOCK", "take"]

LOCK = ".lock"


def take(folder: Path) -> TextIO:
    """Make the folder if need be, and lock it until the file that is returned is closed. ValueError if another has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / LOCK, "a+", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{folder} cannot be written to: {error.strerror} ({error.filename}). Choose another --out.") from None
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
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file
