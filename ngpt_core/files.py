"""How does a file get onto the disk whole, or not at all?

Everything that must survive a crash is written under a temporary name, forced to the disk, and renamed: a rename is atomic
within one file system, so a reader sees the old state or the new one and never half of either.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["cache_folder", "new_folder", "read_json", "sha256", "sync", "write_json", "write_text"]


def sha256(path: Path) -> str:
    """The checksum of a file, read in blocks."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def read_json(path: Path) -> dict:
    """The file's names and values; a ValueError that names the file where it holds none."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("no names and values")
        return value
    except ValueError as error:  # not JSON, or not even text
        raise ValueError(f"{path} is not the JSON it should be ({error}): it was damaged or edited; restore it.") from None


def write_json(path: Path, value: object) -> None:
    """Replace ``path`` by ``value`` as JSON, atomically."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text``, atomically."""
    temporary = None
    with _named(path):
        try:
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
            with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)  # mkstemp's own mode would hide a run from the rest of the group
            os.replace(temporary, path)
        finally:
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """An error in the block names ``path``: a full disk names no file, and the temporary one is nobody's business."""
    try:
        yield
    except OSError as error:
        if error.filename and not Path(error.filename).name.startswith(f".{path.name}-"):
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


def sync(folder: Path) -> None:
    """Force every file below ``folder``, and its directories, to the disk."""
    for root, _, names in os.walk(folder):
        for path in [*(os.path.join(root, name) for name in names), root]:
            if os.name == "nt" and os.path.isdir(path):
                continue  # Windows opens no directory
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that becomes ``path`` when the block ends well, and vanishes when it does not.

    ``path`` may exist only as an empty folder: nothing is overwritten.
    """
    path = Path(path).absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} exists already: nothing is overwritten; choose another folder, or remove it first.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with _named(path):
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
        try:
            yield temporary
            sync(temporary)
            os.chmod(temporary, 0o755)
            os.replace(temporary, path)  # onto nothing, or onto an empty folder
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def cache_folder() -> Path:
    """The per-user cache: $NGPT_CACHE, else $XDG_CACHE_HOME/ngpt, else ~/.cache/ngpt (%LOCALAPPDATA%\\ngpt on Windows)."""
    if chosen := os.environ.get("NGPT_CACHE"):
        return Path(chosen)
    base = os.environ.get("LOCALAPPDATA") if os.name == "nt" else os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "ngpt"
    except RuntimeError:
        raise ValueError("this user has no home folder for a cache: set NGPT_CACHE to a folder you may write to.") from None
