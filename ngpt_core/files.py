"""How is a file written completely or not at all?

Everything that must survive a crash is written under a temporary name, flushed to the disk and renamed. A rename is atomic
within a file system, so a reader sees either the old state or the new one, never a mixture.
"""

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from unicodedata import category

__all__ = [
    "cache_folder",
    "make_folder",
    "new_file",
    "new_folder",
    "printable",
    "read_json",
    "sha256",
    "sync",
    "sync_names",
    "write_json",
    "write_text",
]

_BIDI = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # change the direction of what follows


def printable(text: str) -> str:
    """The text with control characters written out: those from a file could change the terminal or the order of the text."""
    return "".join(c if c in "\n\t" or not (category(c) == "Cc" or c in _BIDI) else repr(c)[1:-1] for c in text)


def sha256(path: Path) -> str:
    """The SHA-256 checksum of a file, read in blocks."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def read_json(path: Path) -> dict:
    """The JSON object in the file. Anything else is a ValueError that names the file."""
    try:
        if path.exists() and not path.is_file():  # reading a pipe or a device may never end
            raise ValueError("not a file")
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("not an object")
        return value
    except (ValueError, RecursionError) as error:  # not JSON, or not even text
        raise ValueError(f"{path} must be a JSON object ({error}): it was damaged or edited; restore it.") from None


def write_json(path: Path, value: object) -> None:
    """Replace the contents of ``path`` with ``value`` as JSON, atomically."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace the contents of ``path`` with ``text``, atomically."""
    with new_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary file that replaces ``path`` when the block succeeds and is removed when it fails. Its mode is the umask's."""
    with _named(path):
        temporary = path.parent / f".{path.name}-{secrets.token_hex(4)}{path.suffix}"
        handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        mode = os.fstat(handle).st_mode & 0o777  # what the umask leaves of 666
        os.close(handle)
        try:
            yield temporary
            os.chmod(temporary, mode)  # the writer may have replaced the file
            with open(temporary, "r+b") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
            sync_names(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Make an OSError in the block name ``path``: a full disk names no file, and the temporary name would only confuse."""
    try:
        yield
    except OSError as error:
        if error.filename and not Path(error.filename).name.startswith(f".{path.name}-"):
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


def sync_names(folder: Path) -> None:
    """Flush the names in a folder to the disk: without it, a power failure may undo a rename or lose a new file."""
    if os.name == "nt":  # Windows cannot open a folder
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot do it
            raise
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """Create the folder and its parents where they are missing, each one flushed to the disk."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_names(path.parent)


def sync(folder: Path) -> None:
    """Flush every file and directory below ``folder`` to the disk."""
    for root, _, names in os.walk(folder):
        for name in names:
            handle = os.open(os.path.join(root, name), os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        sync_names(Path(root))


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that becomes ``path`` when the block succeeds and is removed when it fails.

    ``path`` must not exist, except as an empty folder: nothing is overwritten.
    """
    path = Path(path).absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} already exists and is not overwritten: choose another folder, or remove it first.")
    with _named(path):
        make_folder(path.parent)
        temporary = path.parent / f".{path.name}-{secrets.token_hex(4)}"
        temporary.mkdir()
        try:
            yield temporary
            sync(temporary)
            os.replace(temporary, path)  # path is absent or an empty folder
            sync_names(path.parent)
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
        raise ValueError("This user has no home folder for a cache: set NGPT_CACHE to a writable folder.") from None
