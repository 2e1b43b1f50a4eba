"""How does a C++ file become functions of this process? Compiled on this machine the first time it is needed.

A kernel is a pair of files with the same name, such as ``optim/fused_cpu.cpp`` and ``optim/fused_cpu.py``: the source has a C
interface, and the Python file calls it through ctypes. The library is in the user's cache directory, under a name that depends
on the source, the flags, the compiler and this processor: another compiler, another machine with the same home directory or a
new version of the source gets a separate file. Several processes may race: each compiles to a separate file, and the last
rename wins with the same content. Without a compiler nothing breaks: every kernel has a plain counterpart.

A library is code. It is loaded only if nobody but this user (or root) can write it or its folder, and if its sha256 is the one
that was recorded when it was built. Otherwise it is built again, in a private folder if the cache is open to others.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from .files import cache_folder, new_file, sha256, write_text

__all__ = ["SOURCES", "build", "compiler", "is_ours", "kernel_folder", "library"]

SOURCES = tuple(sorted(Path(__file__).parent.rglob("*.cpp")))

_SHARED = Path(__file__).with_name("simd.h")  # what every source includes
# Not -ffast-math: linked into a library it makes the whole process flush denormals, and NaN must stay NaN.
_FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-std=c++17", "-shared", "-fPIC", "-pthread")
_TUNE = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler knows


def compiler() -> str | None:
    """The C++ compiler of this machine: $CXX, or the first of c++, g++, clang++ on the PATH."""
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def kernel_folder() -> Path:
    """``kernels`` in the user's cache, or a private temporary folder where that cannot be written."""
    try:
        folder = cache_folder() / "kernels"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            if is_ours(folder):
                return folder
    except (OSError, ValueError):  # ValueError: there is no home folder
        pass
    return Path(tempfile.mkdtemp(prefix="ngpt-"))


def is_ours(path: Path) -> bool:
    """Whether only this user, or root, can have written the file or folder."""
    if not hasattr(os, "geteuid"):  # Windows: the cache is in the user's own profile
        return True
    about = path.lstat()
    return about.st_uid in (0, os.geteuid()) and not about.st_mode & 0o022 and not path.is_symlink()


def _is_whole(library: Path) -> bool:
    """Whether the library is the one that was built here, to the byte."""
    record = library.with_suffix(".sha256")
    try:
        return is_ours(library) and is_ours(record) and record.read_text() == sha256(library)
    except (OSError, UnicodeDecodeError):
        return False


def _run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def build(source: Path, folder: Path | None = None, before: Callable[[], None] | None = None) -> Path:
    """The compiled library, built now if it is not in the cache. RuntimeError: a sentence that says what is missing.

    ``before`` is called if the compiler has to run.
    """
    cxx = compiler()
    if cxx is None:
        raise RuntimeError(
            "there is no C++ compiler (c++, g++ or clang++) on this machine. Install one (Debian, Ubuntu: apt install g++; "
            "conda: conda install cxx-compiler; macOS: xcode-select --install) or set CXX to its path."
        )
    for tune in _TUNE:
        about = _run(cxx, *tune, "-dM", "-E", "-x", "c++", os.devnull)  # its version and the instructions it will use
        if about.returncode == 0:
            break
    depends = (source.read_text(), _SHARED.read_text(), *_FLAGS, *tune, about.stdout)
    name = hashlib.sha256("\0".join(depends).encode()).hexdigest()[:20]
    built = (folder or kernel_folder()) / f"{source.stem}-{name}.so"
    if not _is_whole(built):
        if before is not None:
            before()
        with new_file(built) as mine:
            done = _run(cxx, *_FLAGS, *tune, str(source), "-o", str(mine))
            if done.returncode != 0:
                message = (done.stderr.strip() or "no message").splitlines()[0]
                raise RuntimeError(f"the C++ compiler {cxx} could not build the kernel: {message}")
            os.chmod(mine, 0o700)
            digest = sha256(mine)
        write_text(built.with_suffix(".sha256"), digest)
        os.chmod(built, 0o700)  # also where the umask lets others write
        os.chmod(built.with_suffix(".sha256"), 0o600)
    return built


def library(source: Path) -> ctypes.CDLL | str:
    """The library of this source, or a sentence that says why there is none."""
    try:
        return ctypes.CDLL(str(build(source)))
    except (RuntimeError, OSError) as error:
        return str(error)
