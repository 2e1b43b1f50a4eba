"""What is on the disk if a process dies, or the power fails, between two of its calls to the file system?

``Recorder`` wraps the calls by which Python changes files and keeps the content of a folder before each of them. From that it
makes, for every call, up to three states in which a crash may leave the folder:

    killed   everything that was written so far: kill -9
    torn     the same, with half of what is then written to a file before the next call
    power    only what was forced to the disk: content by fsync of the file, names by fsync of their folder

A file whose name survived and whose content was never forced is empty. Equal states are kept once.
"""

import builtins
import contextlib
import io
import os
import pathlib
from collections.abc import Iterator
from pathlib import Path

CALLS = ("open", "replace", "rename", "unlink", "remove", "rmdir", "mkdir", "fsync", "truncate", "ftruncate")
Tree = dict[str, bytes | None]  # path below the folder -> content; None: a folder


class Recorder:
    """Records what happens below ``folder`` while it is active."""

    def __init__(self, folder: Path, graveyard: Path):
        self.folder, self.graveyard = folder, graveyard
        self.calls: list[tuple[str, Tree, Tree]] = []  # (what was called next, killed, power)
        self.contents: dict[int, bytes] = {}  # inode -> what was forced to the disk
        self.names: dict[int, dict[str, tuple[int, bool]]] = {}  # folder's inode -> name -> (inode, is a folder)
        self.busy = False
        graveyard.mkdir()

    def _tree(self) -> Tree:
        found: Tree = {}
        for root, folders, files in os.walk(self.folder):
            for name in folders:
                found[os.path.relpath(os.path.join(root, name), self.folder)] = None
            for name in files:
                path = os.path.join(root, name)
                keep = self.graveyard / str(os.stat(path).st_ino)  # an inode in use is not given to another file
                if not keep.exists():
                    os.link(path, keep)
                found[os.path.relpath(path, self.folder)] = Path(path).read_bytes()
        return found

    def _power(self) -> Tree:
        found: Tree = {}

        def walk(inode: int, prefix: str) -> None:
            for name, (child, is_folder) in self.names.get(inode, {}).items():
                found[prefix + name] = None if is_folder else self.contents.get(child, b"")
                if is_folder:
                    walk(child, f"{prefix}{name}/")

        walk(os.stat(self.folder).st_ino, "")
        return found

    def _before(self, what: str) -> None:
        self.calls.append((what, self._tree(), self._power()))

    def _forced(self, handle: int) -> None:
        about, path = os.fstat(handle), os.readlink(f"/proc/self/fd/{handle}")
        if not path.startswith(str(self.folder)):
            return
        if os.path.isdir(path):
            self.names[about.st_ino] = {e.name: (e.inode(), e.is_dir()) for e in os.scandir(path)}
        else:
            self.contents[about.st_ino] = Path(path).read_bytes()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        real = {name: getattr(os, name) for name in CALLS}
        real_open = builtins.open

        def wrapped(name: str, function):
            def call(*args, **kwargs):
                if self.busy:
                    return function(*args, **kwargs)
                self.busy = True
                try:
                    self._before(f"{name} {args[0]}")
                finally:
                    self.busy = False
                result = function(*args, **kwargs)
                if name == "fsync":
                    self.busy = True
                    self._forced(args[0])
                    self.busy = False
                return result

            return call

        for name, function in real.items():
            setattr(os, name, wrapped(name, function))
        builtins.open = io.open = wrapped("open", real_open)
        own = getattr(pathlib, "_NormalAccessor", None)  # pathlib's own references, in Python 3.10
        kept = {name: x for name, x in vars(own).items() if name in (*CALLS, "open")} if own else {}
        for name in kept:
            setattr(own, name, staticmethod(io.open if name == "open" else getattr(os, name)))
        try:
            yield
        finally:
            for name, function in kept.items():
                setattr(own, name, function)
            for name, function in real.items():
                setattr(os, name, function)
            builtins.open = io.open = real_open

    def states(self) -> list[tuple[str, Tree]]:
        """(what happened, content) of every different state."""
        found: dict[int, tuple[str, Tree]] = {}
        for i, (what, killed, power) in enumerate(self.calls):
            states = [("killed", killed), ("power", power)]
            after = self.calls[i + 1][1] if i + 1 < len(self.calls) else killed
            for name, content in after.items() if not what.startswith(("replace", "rename")) else ():
                if content and (old := killed.get(name) or b"") != content:
                    begin = len(old) if content.startswith(old) else 0  # what was appended, or all of it
                    states.append(("torn", {**killed, name: content[: begin + (len(content) - begin) // 2]}))
            for kind, tree in states:
                found.setdefault(hash((*sorted(tree.items(), key=str),)), (f"{kind} before call {i}: {what}", tree))
        return list(found.values())


def restore(tree: Tree, folder: Path) -> None:
    """Make ``folder`` hold exactly ``tree``."""
    folder.mkdir(parents=True)
    for name, content in sorted(tree.items()):
        path = folder / name
        if content is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
