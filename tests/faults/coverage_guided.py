"""Which bytes does a search find that is guided by the code they reach? Atheris (libFuzzer), where it is installed.

    python tests/faults/coverage_guided.py TARGET [-runs=N]     one target, as a process of its own: libFuzzer ends the process

A target takes bytes and calls readers of files that a stranger may have written. Only ValueError may leave it.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent


Target = tuple[Callable[[bytes], object], bytes]  # and a valid input, with which the search begins


def _sealed(folder: Path) -> Target:
    from ngpt_core.seal import read_sealed, write_sealed

    def target(data: bytes) -> object:
        (folder / "seal.json").write_bytes(data)
        return read_sealed(folder / "seal.json")

    write_sealed(folder / "seal.json", {"format": 1, "files": {}})
    return target, (folder / "seal.json").read_bytes()


def _files(folder: Path) -> Target:
    from ngpt_core.seal import SEAL, check_folder, write_sealed

    def target(data: bytes) -> object:
        write_sealed(folder / SEAL, {"format": 1, "files": json.loads(data)})  # whatever it lists, the seal fits
        return check_folder(folder)

    return target, b'{"a": {"bytes": 1, "sha256": "00"}}'


def _manifest(folder: Path) -> Target:
    from ngpt_core.data.corpus import Corpus
    from ngpt_core.data.packing import pack
    from ngpt_core.data.tokenizers import ByteTokenizer
    from ngpt_core.seal import write_sealed

    def target(data: bytes) -> object:
        value = json.loads(data)
        if isinstance(value, dict):
            write_sealed(folder / "corpus" / "manifest.json", {k: v for k, v in value.items() if k != "seal"})
        return Corpus(folder / "corpus")

    pack([b"one two three four five six"] * 9, folder / "corpus", ByteTokenizer(), val_fraction=0.3)
    return target, (folder / "corpus" / "manifest.json").read_bytes()


def _config(folder: Path) -> Target:
    import ngpt_core as ng

    return lambda data: ng.ModelConfig.from_dict(json.loads(data)), json.dumps(ng.preset("pico").to_dict()).encode()


def _metadata(folder: Path) -> Target:
    import pickle

    from torch.distributed.checkpoint.metadata import Metadata

    from ngpt_core.train.checkpoint import _reading
    from ngpt_core.train.format1 import OldReader

    def target(data: bytes) -> object:
        (folder / ".metadata").write_bytes(data)
        with _reading(folder / "checkpoints" / "step-00000001"):  # as a resumed run reads it
            return OldReader(folder)

    return target, pickle.dumps(Metadata({}, storage_data={}))


TARGETS: dict[str, Callable[[Path], Target]] = {
    "sealed": _sealed, "files": _files, "manifest": _manifest, "config": _config, "metadata": _metadata,
}  # fmt: skip


def run(name: str, count: int) -> Counter:
    """(outcomes) of ``count`` inputs to one target."""
    command = [sys.executable, __file__, name, f"-runs={count}", "-max_len=4096", "-rss_limit_mb=0"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([*command, f"-artifact_prefix={folder}/"], capture_output=True, text=True)
    if done.returncode:
        print(f"  {name}: {done.stdout[-1500:]}{done.stderr[-1500:]}", flush=True)
        return Counter(traceback=1)
    return Counter(refused=count)  # or read: the target does not count them


def main() -> None:
    import atheris

    with atheris.instrument_imports(include=["ngpt_core"]):
        import ngpt_core.config
        import ngpt_core.data.corpus
        import ngpt_core.seal
        import ngpt_core.train.format1  # noqa: F401
    folder = Path(tempfile.mkdtemp())
    target, example = TARGETS[sys.argv[1]](folder)
    (folder / "examples").mkdir()
    (folder / "examples" / "valid").write_bytes(example)

    def test(data: bytes) -> None:
        with contextlib.suppress(ValueError, RecursionError):  # RecursionError: from the target's own json.loads
            target(data)

    atheris.Setup([sys.argv[0], *sys.argv[2:], str(folder / "examples")], test)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
