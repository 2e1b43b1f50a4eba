"""What can go wrong, one case at a time? Each case ends in an outcome; "bad" ones are failures.

Every case goes through the command line (``ngpt_core.cli.main``, in this process) or a public name. An outcome is one of
    restarted, equal, detected, harmless, refused        as it should be
    silent, lost, orphan, traceback, unrestartable       a failure
"""

import contextlib
import io
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from disk import Recorder, Tree, restore
from runs import SMALL, TINY, sentences

import ngpt_core as ng
from ngpt_core.cli import main
from ngpt_core.data.packing import pack
from ngpt_core.data.tokenizers import ByteTokenizer
from ngpt_core.seal import write_sealed
from ngpt_core.train.checkpoint import by_step
from ngpt_core.train.metrics import read_lines, read_metrics

BAD = ("silent", "lost", "orphan", "traceback", "unrestartable")
CLOCK = ("time", "tokens_per_s", "mfu")


def command(*args: object) -> tuple[int | str, str]:
    """(exit status or the type of an error that was not caught, what was printed) of ``ngpt ARGS``."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            status: int | str = main([str(x) for x in args])
        except SystemExit as error:
            status = int(error.code or 0)
        except Exception as error:
            status = f"{type(error).__name__}: {error}"
    return status, out.getvalue()


def flags(values: dict) -> list[str]:
    named = {k: v for k, v in values.items() if v is not False}
    return [f"--{k.replace('_', '-')}={v}" for k, v in named.items()] + [f"--no-{k}" for k, v in values.items() if v is False]


class Place:
    """A corpus, and a run of six steps that nothing disturbed."""

    def __init__(self, folder: Path, **settings: object):
        self.settings = settings  # of the run, where they differ from those of ``train``
        self.interval = settings.get("save_every", 2)
        self.folder, self.corpus, self.run = folder, folder / "corpus", folder / "straight"
        pack(sentences(200), self.corpus, ByteTokenizer(), val_fraction=0.1)
        status, text = command(*self.train(self.run))
        assert status == 0, text
        self.numbers, self.weights = self.result(self.run)

    def train(self, out: Path, *more: object, **settings: object) -> list[object]:
        values = SMALL | {"steps": 6, "save_every": 2, "keep": 2, "eval_windows": 2, "batch_size": 2} | self.settings | settings
        return ["train", f"--data={self.corpus}", f"--out={out}", *flags(TINY), *flags(values), *more]

    def result(self, run: Path) -> tuple[list[dict], dict[str, torch.Tensor]]:
        """The metrics, without what depends on the clock, and the weights."""
        lines = [{k: v for k, v in line.items() if k not in CLOCK} for line in read_metrics(run)]
        return lines, dict(ng.load(run / "export").state_dict())

    def is_same(self, run: Path) -> bool:
        numbers, weights = self.result(run)
        return numbers == self.numbers and all(torch.equal(weights[k], x) for k, x in self.weights.items())


# ---- crashes ---------------------------------------------------------------------------------------------------------
def record(place: Place) -> list[tuple[str, Tree]]:
    """The states in which a crash may leave a run, at every call to the file system."""
    folder = place.folder / "recorded"
    folder.mkdir()
    recorder = Recorder(folder, place.folder / "graveyard")
    with recorder.active():
        status, text = command(*place.train(folder / "run"))
    assert status == 0, text
    shutil.rmtree(folder)
    shutil.rmtree(place.folder / "graveyard")
    return recorder.states()


def crash(place: Place, tree: Tree) -> str:
    """The outcome after a crash that left the run in this state."""
    restore(tree, folder := place.folder / "crashed")
    return restarted(place, folder)


def repeated(run: Path) -> int:
    """How many steps have a line of metrics and are not in the newest checkpoint."""
    metrics = run / "metrics.jsonl"
    trained = [line["step"] for line in read_lines(metrics)] if metrics.is_file() else []
    return max(trained, default=0) - max(by_step(run), default=0)


def restarted(place: Place, folder: Path) -> str:
    """Restart the run in ``folder`` by the same command with --resume: it must repeat at most one interval between
    checkpoints, and end as if nothing had happened."""
    try:
        if repeated(folder / "run") > place.interval:
            return "lost"
        status, _ = command(*place.train(folder / "run"), "--resume")
        if isinstance(status, str):
            return "traceback"
        if status:
            return "unrestartable"
        left = [path.name for path in (*(folder / "run").iterdir(), *(folder / "run" / "checkpoints").iterdir())]
        if any(name.startswith((".", "damaged-")) for name in left if name != ".lock"):  # .lock: of a finished run
            return "orphan"
        return "equal" if place.is_same(folder / "run") else "lost"
    finally:
        shutil.rmtree(folder)


# ---- flipped bits ----------------------------------------------------------------------------------------------------
def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(bytes(data))


def flips(place: Place, count: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """(kind of file, outcome) of ``count`` flips in every file of a run and a corpus, through the command that reads it."""
    rng, folder = random.Random(seed), place.folder / "flipped"
    run, corpus, new = folder / "straight", folder / "corpus", folder / "new"
    last = Path("straight/checkpoints/step-00000006")
    resume, evaluate = [*place.train(run), "--resume"], ["eval", run, "--windows=2"]
    start = ["train", f"--data={corpus}", f"--out={new}", *flags(TINY), *flags(SMALL | {"steps": 1})]
    expected = command("eval", place.run, "--windows=2")[1]
    reading = {last / path.name: resume for path in (place.folder / last).iterdir()}
    reading |= {Path("straight/export") / path.name: evaluate for path in (place.run / "export").iterdir()}
    reading |= {Path("straight/config.json"): evaluate}
    for path in place.corpus.iterdir():
        reading[Path("corpus") / path.name] = [*evaluate, "--data", corpus] if path.name.startswith("val") else start
    for path, reader in sorted(reading.items()):
        for _ in range(count):
            shutil.copytree(place.run, run)
            shutil.copytree(place.corpus, corpus)
            if reader is resume:
                shutil.rmtree(run / "export")
            flip(folder / path, rng)
            status, text = command(*reader)
            if isinstance(status, str) or "Traceback" in text:
                outcome = "traceback"
            elif status:
                outcome = "detected" if text.strip().splitlines()[-1].startswith("ngpt: ") else "silent"
            elif reader is resume:
                outcome = "detected" if "It is set aside" in text and place.is_same(run) else "silent"
            else:
                same = _unchanged(place, corpus) if reader is start else text == expected
                outcome = "harmless" if same else "silent"
            shutil.rmtree(folder)
            yield str(path), outcome


def _unchanged(place: Place, corpus: Path) -> bool:
    """Whether a corpus that was flipped still means the same: white space in its manifest."""
    names = [path.name for path in corpus.iterdir() if path.suffix != ".json"]
    same = all((corpus / name).read_bytes() == (place.corpus / name).read_bytes() for name in names)
    return same and json.loads((corpus / "manifest.json").read_text()) == json.loads(
        (place.corpus / "manifest.json").read_text()
    )


# ---- fuzz ------------------------------------------------------------------------------------------------------------
def paths_of(value: object, at: tuple = ()) -> Iterator[tuple]:
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, child in items:
        yield from paths_of(child, (*at, key))


def changed(value: object, at: tuple, new: object) -> object:
    """A copy of ``value`` with ``new`` at that place."""
    if not at:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)  # type: ignore[call-overload]
    copy[at[0]] = changed(copy[at[0]], at[1:], new)
    return copy


class Sealed:
    """Fuzz of JSON files whose seal fits: a stranger's files, not damage."""

    def __init__(self, place: Place):
        self.place, self.folder = place, place.folder / "fuzzed"
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(place.run, self.folder / "straight")
        shutil.copytree(place.corpus, self.folder / "corpus")
        newest = "straight/checkpoints/step-00000006"
        self.files = {  # the file -> the command that reads it
            "straight/config.json": ["eval", self.folder / "straight", "--windows=1"],
            f"{newest}/state.json": ["check", self.folder / newest],
            f"{newest}/index.json": ["check", self.folder / newest],
            "straight/export/seal.json": ["check", self.folder / "straight" / "export"],
            "straight/export/config.json": [
                "eval",
                self.folder / "straight" / "export",
                "--windows=1",
                f"--data={place.corpus}",
            ],
            "straight/export/ngpt_tokenizer.json": ["generate", self.folder / "straight" / "export", "--max-new-tokens=1"],
            "corpus/manifest.json": ["check", self.folder / "corpus"],
        }
        self.values = {name: json.loads((self.folder / name).read_text()) for name in self.files}
        self.places = {name: list(paths_of(value)) for name, value in self.values.items()}

    def case(self, name: str, at: int, new: object) -> str:
        value = changed(self.values[name], self.places[name][at % len(self.places[name])], new)
        path = self.folder / name
        seal = path.parent / "seal.json"
        whole, sealed = path.read_bytes(), seal.read_bytes() if seal.exists() else None
        try:
            if isinstance(value, dict) and "seal" in self.values[name]:
                write_sealed(path, {k: v for k, v in value.items() if k != "seal"})
            else:
                path.write_text(json.dumps(value))
            if sealed is not None and path != seal:
                seal.unlink()
            return outcome_of(*command(*self.files[name]))
        finally:
            path.write_bytes(whole)
            if sealed is not None:
                seal.write_bytes(sealed)


def outcome_of(status: int | str, text: str) -> str:
    if isinstance(status, str) or "Traceback" in text:
        return "traceback"
    return "refused" if status else "harmless"


def called(function: Callable, *args: object, **kwargs: object) -> str:
    """A public name with bad input: only our own ValueErrors."""
    try:
        function(*args, **kwargs)
    except ValueError:
        return "refused"
    except KeyboardInterrupt:
        raise
    except BaseException:  # a panic of a library in Rust is one
        return "traceback"
    return "harmless"


def table(outcomes: Counter) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))
