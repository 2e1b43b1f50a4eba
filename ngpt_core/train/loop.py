"""How is a run carried out? Begin or resume, step after step, evaluate, save, stop on a signal, export.

    trainer.py     one step                          checkpoint.py   surviving
    run.py         what was asked for                metrics.py      what is logged

``train`` is all of it. An error after a step must not lose the step: ``saved_on_failure``.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from functools import partial

import torch

from .. import recipe
from ..gpus import peak_flops
from ..nn.model import LanguageModel
from .checkpoint import newest
from .config import recipe_numbers
from .flops import flops_per_token
from .folder import RunFolder
from .memory import OutOfMemory, room_for
from .metrics import Metrics, check_wandb
from .run import Run, open_blend
from .trainer import Trainer
from .world import World, lost_a_peer, start

__all__ = ["dry_run", "train"]


def train(run: Run) -> int:
    """Train, or continue, until the run's last step. Returns the process's exit status: 0, or 143 if a signal asked to stop."""
    if run.finished:
        print(f"{run.folder} is finished: {run.steps} steps. Nothing to do.", file=sys.stderr)
        return 0
    check_wandb(run.config.wandb)
    world, folder, lock = start(run.config), RunFolder(run.folder), None
    try:
        corpora, held_out = _corpora(run, world)
        with room_for("making the model", "Choose a smaller one, or divide it among more ranks (torchrun)."):
            trainer = Trainer(run, world, corpora)
        if run.config.sample_tokens:
            trainer.prompt()  # an error in it is reported before the first step, not after the last
        lock = world.first(lambda: folder.claim(run))
        if run.checkpoint is not None:
            with room_for(f"reading {run.checkpoint.path}", trainer.memory_advice()):
                trainer.resume(run.checkpoint)
        world.first(lambda: folder.begin(run, corpora))
        return _loop(trainer, held_out)
    except RuntimeError as error:
        if world.size > 1 and lost_a_peer(error):
            raise ValueError(f"rank {world.rank} ends because another rank has ended: see the error of that one.") from None
        raise
    finally:
        world.close()
        if lock is not None:
            lock.close()


def _corpora(run: Run, world: World) -> tuple[list, list]:
    """(the corpora to train on, those with a held-out split), verified by all ranks together."""
    config, vocab_size = run.config, run.model.vocab_size
    open_data = partial(open_blend, config.data, vocab_size, run.tokenizer, run.folder)
    corpora = world.first(open_data) or open_data()  # the first rank goes first: it may have to pack a corpus
    if config.verify_data:
        for corpus, _ in corpora:
            corpus.verify(world.rank, world.size)
    if not config.val_data:
        return corpora, [c for c in corpora if c[0].has("val")]
    held_out = open_blend(config.val_data, vocab_size, corpora[0][0].manifest["tokenizer"], "--data", "--val-data")
    if not all(corpus.has("val") for corpus, _ in held_out):
        raise ValueError("--val-data needs corpora with a held-out split: pack them with --val-fraction above 0.")
    return corpora, held_out


def _loop(trainer: Trainer, held_out: list) -> int:
    run, world, config, total = trainer.run, trainer.world, trainer.run.config, trainer.run.steps
    metrics = Metrics(run.folder, trainer.t, total, config.tensorboard, config.wandb) if world.main else None
    flops, peak = flops_per_token(run.model, config.seq_len), peak_flops(world.device) * world.size

    def due(every: int) -> bool:
        return trainer.t == total or (every > 0 and trainer.t % every == 0)

    with _signals(trainer):
        while trainer.t < total and not trainer.stop:
            look = config.diagnostics_every > 0 and (trainer.t + 1) % config.diagnostics_every == 0
            record, text = _step(trainer, look), None
            record["mfu"] = record["tokens_per_s"] * flops / peak
            with _saved_on_failure(trainer), room_for(f"evaluating step {trainer.t}", trainer.memory_advice()):
                try:
                    if held_out and due(config.eval_every) and (loss := trainer.validate(held_out)) == loss:  # not nan
                        record["val_loss"] = loss
                    if config.sample_tokens and due(config.sample_every):
                        text = trainer.sample()
                finally:  # every step has its line, even if it could not be evaluated
                    if metrics is not None:
                        metrics.write(record, text)
            if due(config.save_every) or trainer.stop:
                trainer.save()
        trainer.checkpoints.finish()
        if metrics is not None:
            metrics.close()
        if trainer.t < total:
            if world.main:
                print(f"\nstopped at step {trainer.t} of {total}, saved; continue with --resume.", file=sys.stderr)
            return 128 + signal.SIGTERM
        trainer.export()
    return 0


@contextlib.contextmanager
def _saved_on_failure(trainer: Trainer) -> Iterator[None]:
    """Saves the last step before an error leaves the block. Not if one rank of many ran out of memory or disk: the others would
    not join the save."""
    try:
        yield
    except (ValueError, OSError) as error:
        if trainer.world.size == 1 or not isinstance(error, (OutOfMemory, OSError)):
            trainer.save()
            trainer.checkpoints.finish()
        raise


def _step(trainer: Trainer, look: bool) -> dict:
    """One step. If memory runs out in a single process before the update begins, the step before it is saved."""
    t, counts = trainer.t, list(trainer.loader.counts)
    try:
        with room_for(f"step {t + 1}", trainer.memory_advice()):
            return trainer.step(look)
    except OutOfMemory as error:
        trainer.optimizer.zero_grad(set_to_none=True)
        trainer.loader.counts = counts
        if trainer.world.size == 1:
            if trainer.t == t != trainer.saved:
                trainer.save()
            trainer.checkpoints.finish()
        last = newest(trainer.run.folder)
        again = f"continue{f' from {last}' if last else ''} with --resume" if t else "start again"
        raise OutOfMemory(f"{error} Then {again}.") from None


@contextlib.contextmanager
def _signals(trainer: Trainer) -> Iterator[None]:
    """SIGTERM and Ctrl-C ask the loop to save and stop after the current step."""

    def ask(number: int, frame: object) -> None:
        trainer.asked = True

    if threading.current_thread() is not threading.main_thread():  # only that one receives signals
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
    return f"{recipe.format_table(rows)}\n{len(rows)} parameters, {size:,} numbers; {run.steps:,} steps, {tokens:,} tokens"
