"""How does a run proceed? Begin or resume, train step by step, evaluate, save, stop on a signal, export.

    trainer.py     one step                          checkpoint.py   saving and resuming
    run.py         new, or resumed?                  metrics.py      what is logged

``train`` does all of it. An error after a step must not lose the step: ``_saved_on_failure``.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial

import torch

from .. import native, recipe
from ..files import printable
from ..nn.model import LanguageModel
from ..seal import Damaged
from .checkpoint import newest
from .config import in_force, recipe_numbers
from .folder import RunFolder
from .memory import OutOfMemory, room_for
from .metrics import Metrics, check_loggers
from .recovery import load_newest
from .run import Run, named_tokenizer, open_blend
from .sentinel import RETURNS, Corrupted
from .trainer import Trainer
from .watchdog import FOLLOWS, WHO, Watchdog
from .world import World, lost_a_peer, start

__all__ = ["dry_run", "train"]


def train(run: Run) -> int:
    """Train, or continue, until the run's last step. Returns the process's exit status: 0, or 143 if a signal asked to stop."""
    if run.finished:
        print(printable(f"{run.folder} is finished: {run.steps} steps. Nothing to do."), file=sys.stderr)
        return 0
    check_loggers(run.config)
    world, folder, lock, why = start(run.config), RunFolder(run.folder), None, ""
    try:
        corpora, held_out = _corpora(run, world)
        with room_for("making the model", "Choose a smaller one, or divide it among more ranks (torchrun)."):
            trainer = Trainer(run, world, corpora)
        if run.config.sample_tokens:
            trainer.prompt()  # an error in it is reported before the first step, not after the last
        lock = world.first(lambda: folder.claim(run))
        if run.checkpoint is not None:
            with room_for(f"reading {run.checkpoint.path}", trainer.memory_advice()):
                run = replace(run, checkpoint=load_newest(run.folder, world, trainer.resume))
        world.first(lambda: folder.begin(run, corpora))
        if world.device.type == "cpu":
            world.first(_kernels)
        if world.size > 1:
            world.watchdog = Watchdog(world.rank, world.size, run.config.timeout, run.folder)
        return _loop(trainer, held_out)
    except BaseException as error:
        why = f"{type(error).__name__}: {error}"
        if world.size > 1 and isinstance(error, Exception) and lost_a_peer(error):
            why = f"{FOLLOWS}: {world.watchdog.who_ended() if world.watchdog else WHO}"
            last = newest(run.folder)
            action = f"Continue from {last} with --resume." if last else "Start the run again."
            raise ValueError(f"rank {world.rank} ends because {why}. {action}") from None
        raise
    finally:
        world.close(why)
        if lock is not None:
            lock.close()


def _kernels() -> None:
    """Compile the C++ kernels now, with a message, if this machine has not done so yet. Without a compiler, do nothing."""
    announce = cache(lambda: print("compiling the kernels for this CPU, once on this machine ...", file=sys.stderr))
    with contextlib.suppress(RuntimeError, OSError):
        for source in native.SOURCES:
            native.build(source, before=announce)


def _corpora(run: Run, world: World) -> tuple[list, list]:
    """(the corpora to train on, those with a held-out split), verified by all ranks together."""
    config, vocab_size = run.config, run.model.vocab_size
    reader = RunFolder(run.folder).tokenizer if run.tokenizer else partial(named_tokenizer, config)
    open_data = partial(open_blend, config.data, vocab_size, run.tokenizer, run.folder, reader=reader)
    corpora = world.first(open_data) or open_data()  # the first rank goes first: it may have to pack a corpus
    if config.verify_data is not False:
        for corpus, _ in corpora:
            corpus.verify(world.rank, world.size, everything=config.verify_data is True)
    if not config.val_data:
        return corpora, [c for c in corpora if c[0].has("val")]
    owner = corpora[0][0]  # of the tokenizer
    open_held_out = partial(
        open_blend, config.val_data, vocab_size, owner.manifest["tokenizer"], "--data", "--val-data", owner.tokenizer, "val"
    )
    held_out = world.first(open_held_out) or open_held_out()
    if config.verify_data is not False:
        for corpus, _ in held_out:
            corpus.verify(world.rank, world.size, splits=("val",), everything=config.verify_data is True)
    if not all(corpus.has("val") for corpus, _ in held_out):
        raise ValueError("--val-data needs corpora with a held-out split: pack them with --val-fraction above 0.")
    return corpora, held_out


def _loop(trainer: Trainer, held_out: list) -> int:
    run, world, total = trainer.run, trainer.world, trainer.run.steps
    metrics = Metrics(run, trainer.t, world) if world.main else None

    with _signals(trainer):
        while trainer.t < total and not trainer.stop:
            try:
                _advance(trainer, held_out, metrics)
            except Corrupted as damage:
                _go_back(trainer, damage)
                if metrics is not None:
                    metrics.close(finished=False)
                    metrics = Metrics(run, trainer.t, world)
        trainer.checkpoints.finish()
        if metrics is not None:
            metrics.close(finished=trainer.t == total)
        if trainer.t < total:
            if world.main:
                print(f"\nstopped at step {trainer.t} of {total}, saved; continue with --resume.", file=sys.stderr)
            return 128 + signal.SIGTERM
        world.at("exporting the model")
        trainer.export()
    return 0


def _advance(trainer: Trainer, held_out: list, metrics: Metrics | None) -> None:
    """One step, and what is due after it: the held-out loss, a sample, lines of metrics, a checkpoint."""
    config, total = trainer.run.config, trainer.run.steps

    def due(every: int) -> bool:
        return trainer.t == total or (every > 0 and trainer.t % every == 0)

    diagnose = config.diagnostics_every > 0 and (trainer.t + 1) % config.diagnostics_every == 0
    record = _step(trainer, diagnose, metrics)
    trainer.world.at(f"evaluation and metrics of step {trainer.t}")
    evaluates, samples = bool(held_out) and due(config.eval_every), config.sample_tokens > 0 and due(config.sample_every)
    if evaluates or samples or due(config.save_every) or trainer.stop:
        trainer.finish()  # nothing of a step that is not finite is evaluated or saved
    text = None
    with _saved_on_failure(trainer, metrics), room_for(f"evaluating step {trainer.t}", trainer.memory_advice()):
        try:
            if evaluates and (loss := trainer.validate(held_out)) == loss:  # not nan
                record["val_loss"] = loss
            if samples:
                text = trainer.sample()
        finally:  # every step gets its line, even if its evaluation failed
            if metrics is not None:
                metrics.write(text)
    if due(config.save_every) or trainer.stop:
        if metrics is not None:
            metrics.sync()  # a checkpoint must not survive a power failure that its steps' lines do not
        trainer.save()
        if metrics is not None:
            metrics.saved()


def _go_back(trainer: Trainer, damage: Corrupted) -> None:
    """Continue from the last good checkpoint. ValueError if there is none, or if going back has not helped."""
    assert trainer.sentinel is not None  # it raised the error
    done = trainer.t
    trainer.checkpoints.finish()
    if newest(trainer.run.folder) is None:
        raise ValueError(f"{damage} There is no checkpoint to go back to: start the run again.") from None
    trainer.optimizer.zero_grad(set_to_none=True)
    trainer.parallel.reshard()
    try:
        checkpoint = load_newest(trainer.run.folder, trainer.world, trainer.resume)
    except Damaged as error:
        raise ValueError(f"{damage} Training cannot go back: {error}") from None
    trainer.sentinel.returns[trainer.t] += 1
    if trainer.sentinel.returns[trainer.t] > RETURNS:
        raise ValueError(
            f"{damage} Training went back to {checkpoint.path} {RETURNS} times, and it happened again: replace the machine. If "
            "its results are not meant to be the same to the bit, continue with --resume --sentinel 0."
        ) from None
    if trainer.world.main:
        action = f"training goes back to {checkpoint.path} and repeats {done - trainer.t} steps"
        print(printable(f"\nngpt: {damage} Therefore {action}."), file=sys.stderr)


@contextlib.contextmanager
def _saved_on_failure(trainer: Trainer, metrics: Metrics | None) -> Iterator[None]:
    """Save the last step before an error leaves the block, unless one rank of many ran out of memory or disk: the others would
    not join the save."""
    try:
        yield
    except (ValueError, OSError) as error:
        if trainer.world.size == 1 or not isinstance(error, (OutOfMemory, OSError)):
            _save_now(trainer, metrics)
        raise


def _save_now(trainer: Trainer, metrics: Metrics | None) -> None:
    """Save the last step because of an error, and write the metrics that are still waiting."""
    trainer.save()
    trainer.checkpoints.finish()
    if metrics is not None:
        with contextlib.suppress(ValueError, OSError):  # the error itself may be that they cannot be written
            metrics.write()


def _step(trainer: Trainer, diagnose: bool, metrics: Metrics | None) -> dict:
    """One step. If memory runs out in a single process before the update begins, the step before it is saved."""
    t, counts = trainer.t, list(trainer.loader.counts)
    try:
        with room_for(f"step {t + 1}", trainer.memory_advice()):
            record = trainer.step(diagnose) if trainer.sentinel is None else trainer.sentinel.step(diagnose)
    except OutOfMemory as error:
        trainer.optimizer.zero_grad(set_to_none=True)
        trainer.loader.counts = counts
        if trainer.world.size == 1:
            if trainer.t == t != trainer.saved:
                _save_now(trainer, metrics)
            trainer.checkpoints.finish()
        last = newest(trainer.run.folder)
        action = f"continue{f' from {last}' if last else ''} with --resume" if t else "start again"
        raise OutOfMemory(f"{error} Then {action}.") from None
    if metrics is not None:
        metrics.add(record)
    return record


@contextlib.contextmanager
def _signals(trainer: Trainer) -> Iterator[None]:
    """SIGTERM and Ctrl-C ask the loop to save and stop after the current step; on a GPU it may begin one more."""

    def ask(number: int, frame: object) -> None:
        trainer.stop_requested = True

    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        yield
        return
    old = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def dry_run(run: Run) -> str:
    """``ngpt train --dry-run``: the recipe's table and the run's size. Nothing is trained or written."""
    with torch.device("meta"):
        model = LanguageModel(run.model)
    rows = recipe.table(model, run.steps, recipe_numbers(run.config, run.model, run.steps))
    tokens = run.steps * run.config.batch_size * run.config.seq_len
    size = sum(p.numel() for p in model.parameters())
    return (
        f"{in_force(run.config, run.model, run.steps, run.scaled)}\n{recipe.format_table(rows)}\n"
        f"{len(rows)} parameters, {size:,} numbers; {run.steps:,} steps, {tokens:,} tokens"
    )
