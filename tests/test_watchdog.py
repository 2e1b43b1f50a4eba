"""Ranks that hang: the late one is named, every process ends with its stacks written, and the run goes on from its checkpoint.

Real processes, as a scheduler would start them: no torchrun that ends them, and nothing but the watchdog to notice.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import time

import pytest
import torch
from runs import losses, new_run
from test_parallel import on_ranks

from ngpt_core.data.loader import Loader
from ngpt_core.train import checkpoint
from ngpt_core.train.loop import train
from ngpt_core.train.run import prepare
from ngpt_core.train.trainer import Trainer
from ngpt_core.train.watchdog import EXIT

STEPS, TIMEOUT = 6, 10


def _stop(*args) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _kill(*args) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _sleep(*args) -> None:
    time.sleep(600)


def _term(*args) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


FAULTS = {"stop": _stop, "kill": _kill, "sleep": _sleep, "term": _term}
PLACES = {  # where a fault strikes: (object, the name of its method, is it time?)
    "data": (Loader, "next", lambda self, *args: self.split == "train" and sum(self.counts) == 12),  # of step 4
    "disk": (checkpoint, "sync", lambda folder: folder.name == ".step-00000004"),
    "save": (Trainer, "save", lambda self: self.t == 4),
}


def _rank(rank, size, port, run, fault, place, bad, errors) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    owner, name, due = PLACES[place]
    real = getattr(owner, name)

    def strike(*args, **kwargs):
        if rank == bad and due(*args):
            FAULTS[fault]()
        return real(*args, **kwargs)

    setattr(owner, name, strike)
    try:
        code = train(run)
    except ValueError as error:
        print(f"ngpt: {error}", file=sys.stderr, flush=True)
        code = 1
    os._exit(code)


def play(size, run, fault, place, bad) -> tuple[list, list[str]]:
    """Train on real ranks, of which one is ``bad``. Returns exit codes (None: not ended) and what each wrote to stderr."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.checkpoint", "torch.distributed.fsdp", "ngpt_core.train.loop"])
    errors = [run.folder.with_name(f"{run.folder.name}-{r}.txt") for r in range(size)]
    ranks = [context.Process(target=_rank, args=(r, size, port, run, fault, place, bad, str(errors[r]))) for r in range(size)]
    begin = time.monotonic()
    for process in ranks:
        process.start()
    try:
        for r, process in enumerate(ranks):
            if not (fault == "stop" and r == bad):
                process.join(begin + 120 - time.monotonic())
        codes = [process.exitcode for process in ranks]
        if fault == "stop":  # the scheduler, or someone who finds it, lets it go on
            with contextlib.suppress(ProcessLookupError):  # it has ended: the codes tell
                os.kill(ranks[bad].pid, signal.SIGCONT)
            ranks[bad].join(30)
            codes[bad] = ranks[bad].exitcode
    finally:
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    return codes, [" ".join(path.read_text().split()) if path.exists() else "" for path in errors]


def _resume(settings) -> None:
    assert train(prepare(settings, {}, resume=True)) == 0


def goes_on(size, run, straight) -> None:
    """After the fault, the run continues from its last complete checkpoint to the same end."""
    on_ranks(size, _resume, {"out": str(run.folder)})
    assert losses(run.folder) == pytest.approx(losses(straight), abs=1e-5)
    assert [p.name for p in (run.folder / "checkpoints").glob(".*")] == []


@pytest.fixture(scope="module")
def straight(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight") / "run"
    train(new_run(corpus, folder, steps=STEPS))
    return folder


def a_run(corpus, tmp_path):
    return new_run(corpus, tmp_path / "run", steps=STEPS, save_every=2, timeout=TIMEOUT)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(("size", "bad"), [(2, 1), pytest.param(2, 0, marks=SLOW), pytest.param(4, 2, marks=SLOW)])
def test_a_stopped_rank_is_named_and_ends_when_it_wakes(corpus, straight, tmp_path, size, bad):
    """Rank 0 holds the store of the ranks: if it is stopped, the store does not answer either."""
    run = a_run(corpus, tmp_path)
    codes, errors = play(size, run, "stop", "data", bad)
    assert codes == [EXIT] * size
    for rank in set(range(size)) - {bad}:
        assert f"rank {bad} (process " in errors[rank] and "is stopped, last seen at '" in errors[rank]
        assert f"continue from {run.folder / 'checkpoints' / 'step-00000002'} with --resume" in errors[rank]
        assert "all_reduce" in (run.folder / f"stacks-rank-{rank:05d}.txt").read_text()
    assert "the others do not wait that long" in (run.folder / f"stacks-rank-{bad:05d}.txt").read_text()
    goes_on(size, run, straight)


@pytest.mark.parametrize(("size", "bad"), [(2, 1), pytest.param(4, 3, marks=SLOW)])
def test_a_rank_that_dies_inside_a_save_is_reported_as_dead(corpus, straight, tmp_path, size, bad):
    run = a_run(corpus, tmp_path)
    codes, errors = play(size, run, "kill", "save", bad)
    assert codes == [-signal.SIGKILL if rank == bad else 1 for rank in range(size)]
    said = [error for error in errors if f"rank {bad} (process " in error and "was killed or has crashed" in error]
    assert said and all("this rank is at 'writing the checkpoint of step 4'. Continue from" in error for error in said)
    assert checkpoint.newest(run.folder).name == "step-00000002"
    goes_on(size, run, straight)


@SLOW
@pytest.mark.parametrize(("size", "bad"), [(2, 1), (2, 0), (4, 2)])
def test_a_slow_rank_is_named_by_all(corpus, straight, tmp_path, size, bad):
    run = a_run(corpus, tmp_path)
    codes, errors = play(size, run, "sleep", "data", bad)
    assert codes == [EXIT] * size
    for error in errors:
        assert f"rank {bad} is late: at 'step 4: reading the batch'" in error and f"Waiting: rank {int(not bad)} at '" in error
    assert "in _sleep" in (run.folder / f"stacks-rank-{bad:05d}.txt").read_text()
    goes_on(size, run, straight)


@SLOW
@pytest.mark.parametrize("size", [2, 4])
def test_a_slow_disk_is_named_and_the_incomplete_checkpoint_is_not_used(corpus, straight, tmp_path, size):
    run = a_run(corpus, tmp_path)
    codes, errors = play(size, run, "sleep", "disk", 0)
    assert codes == [EXIT] * size
    assert all("rank 0 is late: at 'writing the checkpoint of step 4'" in error for error in errors)
    assert "in _sleep" in (run.folder / "stacks-rank-00000.txt").read_text()
    assert checkpoint.newest(run.folder).name == "step-00000002"
    goes_on(size, run, straight)
