"""How is a run carried out? Begin or resume, step after step, evaluate, save, stop on a signal, export.

    trainer.py     one step                          checkpoint.py   surviving
    run.py         what was asked for                metrics.py      what a person sees

``train`` is the whole of it; what fails after a step was made must not lose the step.
"""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial

import torch

from .. import recipe
from ..gpus import peak_flops
from ..nn.model import LanguageModel
from .checkpoint import newest
from .config import recipe_numbers
from .flops import flops_per_token
from .memory import OutOfMemory, room_for
from .metrics import Metrics, check_wandb
from .run import Run, open_blend
from .trainer import Trainer
from .world import World, lost_a_peer, start

__all__ = ["dry_run", "train"]


def train(run: Run) -> int:
    """Train, or go on training, until the run's last step. Returns the process's exit status: 0, or 143 when told to stop."""
    if run.finished:
        print(f"{run.folder} is finished: {run.steps} steps. Nothing to do.", file=sys.stderr)
        return 0
    check_wandb(run.config.wandb)
    config, world, lock = run.config, start(run.config), None
    try:
        corpora = _corpora(run, world)
        held_out = [c for c in corpora if c[0].has("val")]
        if config.val_data:
            tokenizer = corpora[0][0].manifest["tokenizer"]
            held_out = open_blend(config.val_data, run.model.vocab_size, tokenizer, "--data", "--val-data")
        if config.val_data and not all(corpus.has("val") for corpus, _ in held_out):
            raise ValueError("--val-data needs corpora with a held-out split: pack them with --val-fraction above 0.")
        with room_for("making the model", "Choose a smaller one, or divide it among more ranks (torchrun)."):
            trainer = Trainer(run, world, corpora)
        if config.sample_tokens:
            trainer.prompt()  # a slip is told before the first step, not after the last
        lock = world.first(run.claim)
        if run.checkpoint is not None:
            with room_for(f"reading {run.checkpoint}", trainer.lower()):
                trainer.resume()
        world.first(lambda: run.begin(corpora))
        return _loop(trainer, held_out)
    except RuntimeError as error:
        if world.size > 1 and lost_a_peer(error):
            raise ValueError(f"rank {world.rank} ends because another one has: that one says why.") from None
        raise
    finally:
        world.close()
        if lock is not None:
            lock.close()


def _corpora(run: Run, world: World) -> list:
    """Open the data; the first rank first, for it may have to pack a corpus into the cache. Then verify, all ranks together."""
    open_data = partial(open_blend, run.config.data, run.model.vocab_size, run.packed_with, run.folder)
    corpora = world.first(open_data) or open_data()
    if run.config.verify_data:
        for corpus, _ in corpora:
            corpus.verify(world.rank, world.size)
    return corpora


def _loop(trainer: Trainer, held_out: list) -> int:
    run, world, config, total = trainer.run, trainer.world, trainer.run.config, trainer.run.steps
    metrics = Metrics(run.folder, trainer.t, total, config.tensorboard, config.wandb) if world.main else None
    flops, peak = flops_per_token(run.model, config.seq_len), peak_flops(world.device) * world.size
    began, at_start = time.perf_counter(), trainer.t

    def due(every: int, last: bool = True) -> bool:
        return (every > 0 and trainer.t % every == 0) or (last and trainer.t == total)

    with _signals(trainer):
        while trainer.t < total and not trainer.stop:
            look = config.diagnostics_every > 0 and (trainer.t + 1) % config.diagnostics_every == 0
            record, text, failed = _step(trainer, look), None, None
            record["mfu"] = record["tokens_per_s"] * flops / peak
            try:
                with room_for(f"looking at step {trainer.t}", trainer.lower()):
                    if held_out and due(config.eval_every) and (loss := trainer.validate(held_out)) == loss:  # not nan
                        record["val_loss"] = loss
                    text = trainer.sample() if config.sample_tokens and due(config.sample_every) else None
            except ValueError as error:
                failed = error
            if metrics is not None:
                try:
                    metrics.write(record)
                    if text is not None:
                        metrics.sample(trainer.t, text)
                except OSError as error:
                    failed = OSError(error.errno, f"metrics of step {trainer.t}: {error.strerror}", str(run.folder))
                per_step = (time.perf_counter() - began) / (trainer.t - at_start)
                metrics.progress(record, (total - trainer.t) * per_step)
            if world.size > 1 and isinstance(failed, (OutOfMemory, OSError)):
                raise failed  # on this rank alone: the others do not come to save
            if due(config.save_every) or trainer.stop or failed:  # the step was made: what fails after it must not lose it
                trainer.save()
            if failed:
                trainer.checkpoints.finish()
                raise failed
        trainer.checkpoints.finish()
        if metrics is not None:
            metrics.close()
        if trainer.t < total:
            if world.main:
                print(f"\nstopped at step {trainer.t} of {total}, saved; continue with --resume.", file=sys.stderr)
            return 128 + signal.SIGTERM
        trainer.export()
    return 0


def _step(trainer: Trainer, look: bool) -> dict[str, object]:
    """A step. If memory runs out before the update begins, and in one process, what was trained so far is saved first."""
    t, counts = trainer.t, list(trainer.loader.counts)
    try:
        with room_for(f"step {t + 1}", trainer.lower()):
            return trainer.step(look)
    except OutOfMemory as error:
        trainer.optimizer.zero_grad(set_to_none=True)
        trainer.loader.counts = counts
        if trainer.world.size == 1:
            trainer.checkpoints.finish()
            last = newest(trainer.run.folder)
            if trainer.t == t > 0 and (last is None or last.name != f"step-{t:08d}"):
                trainer.save()
                trainer.checkpoints.finish()
        last = newest(trainer.run.folder)
        again = f"continue{f' from {last}' if last else ''} with --resume" if t else "start again"
        raise OutOfMemory(f"{error} Then {again}.") from None


@contextlib.contextmanager
def _signals(trainer: Trainer) -> Iterator[None]:
    """SIGTERM and Ctrl-C ask the loop to save and end after the step that it is in."""

    def ask(number, frame):
        trainer.asked = True

    if threading.current_thread() is not threading.main_thread():  # Python gives signals to the main thread alone
        yield
        return
    old = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def dry_run(run: Run) -> str:
    """``ngpt train --dry-run``: the recipe's table, and the run's size. Nothing is trained or written."""
    with torch.device("meta"):
        model = LanguageModel(run.model)
    rows = recipe.table(model, run.steps, recipe_numbers(run.config, run.model, run.steps))
    tokens = run.steps * run.config.batch_size * run.config.seq_len
    size = sum(p.numel() for p in model.parameters())
    return f"{recipe.format_table(rows)}\n{len(rows)} parameters, {size:,} numbers; {run.steps:,} steps, {tokens:,} tokens"
