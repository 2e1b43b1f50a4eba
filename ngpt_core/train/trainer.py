"""What happens in one training step? ``Trainer.step`` fits on one screen; its parts are in other files.

    data/          which tokens                      recipe/         optimizer, learning rates, schedule (the paper's recipe)
    parallel.py    many ranks                        checkpoint.py   saving and resuming
    evaluate.py    the held-out loss                 sentinel.py     damaged numbers
    loop.py        the run around the step           watchdog.py     ranks that hang
    message.py     what the ranks tell each other

Symbols: t the step, counted from 1; B sequences of T tokens in a global batch. "The message" (message.py) is the single
all-reduce of a step's statistics, by which the ranks also agree on when to stop. On a GPU the host reads it one step late, and
waits for nothing else: a step that is not finite is skipped on the device, and its error comes one step later.
"""

import math
import time
from collections import deque

import numpy as np
import torch
from torch import Tensor

from .. import recipe
from ..data.loader import Loader
from ..data.tokenizers import stream_text
from ..files import new_folder
from ..nn import stream
from ..nn.io import save as save_model
from ..nn.model import LanguageModel
from ..optim.arriving import Arriving
from ..optim.diagnostics import Diagnostics
from ..optim.gated_adamw import GatedAdamW
from ..optim.sharding import local
from ..rehearsal import on_gpu, rehearsing
from ..seal import Damaged, entry, seal_folder, unseal
from .checkpoint import Checkpoint, Checkpoints
from .config import recipe_numbers
from .evaluate import evaluate
from .feed import Feed
from .message import Layout, Message, Step
from .parallel import gathered, initialize, parallelize
from .run import Run, check_belongs
from .sentinel import Sentinel
from .trained import write_tokenizer
from .world import World

__all__ = ["Trainer"]

PROMPT = 24  # tokens of a held-out document with which a sample begins


class Trainer:
    """A model with everything that one optimizer step needs."""

    def __init__(self, run: Run, world: World, corpora: list):
        self.run, self.world, config = run, world, run.config
        self.t = self.saved = 0  # steps done so far, and steps in the newest checkpoint
        self.seconds = 0.0  # of training, over all sessions of the run
        self.stop_requested = False  # a signal asked this process to stop
        self.stop = False  # a signal asked any rank to stop: all stop after the same step
        self.rows = config.micro_batch or config.batch_size // world.size
        with world.device if rehearsing() else torch.device("meta"):  # a rehearsal's tensors never have memory
            self.model = LanguageModel(run.model)
        self.parallel = parallelize(self.model, config, world)
        self.loader = Loader(corpora, config.batch_size, config.seq_len, "train", config.seed, world.rank, world.size)
        initialize(self.model, config.seed, world.device)
        numbers = recipe_numbers(config, run.model, run.steps)
        self.optimizer, self.schedule = recipe.build(self.model, run.steps, numbers)
        self.clip_norm = numbers.clip_norm
        # the metrics report the input embedding's learning rate, which is the global one in both recipes
        self.rate = next(g for g in self.optimizer.param_groups if "embedding.weight" in g["param_names"])
        self.checkpoints = Checkpoints(run.folder, world, config.keep, config.keep_every, config.async_save)
        self.sentinel = Sentinel(self, config.sentinel) if config.sentinel else None
        self.layout = Layout.of(self.model)
        # On a GPU the host reads a step's message when the next step is under way, if the optimizer can skip a step by itself.
        self.late = on_gpu(self.rate["params"][0]) and isinstance(self.optimizer, GatedAdamW)
        self.feed = Feed(self.loader, self.rows, world.device, ahead=on_gpu(self.rate["params"][0]) and not rehearsing())
        self.unread: deque[Step] = deque()  # the steps whose message has not been read
        self.bad = torch.zeros((), dtype=torch.bool, device=world.device)  # a step since the last checkpoint was not finite
        self.read_at = 0.0  # when the last message was read

    def step(self, diagnose: bool = False) -> dict:
        """One optimizer step; ``diagnose`` also collects the optimizer's diagnostics. Returns the step's numbers; if they are
        read late, the dict stays empty until the end of the next step, or ``finish``."""
        begin, at = time.perf_counter(), f"step {self.t + 1}: "
        self.world.at(at + "reading the batch")
        batch = self.feed.next()
        targets = self.world.sum(batch.counted).clamp(min=1)  # in the global batch
        sums = torch.zeros((), device=self.world.device, dtype=torch.float64)
        for i, x in enumerate(batch.micro_batches, start=1):
            self.world.at(f"{at}micro-batch {i}")
            self.parallel.micro_batch(last=i == len(batch.micro_batches))
            self.model.loss(x.tokens, x.targets, x.documents, denominator=targets).backward()
            stats: dict = self.model.stats
            sums = sums + torch.cat([stats["cross_entropy"][None], stats["balance"][None], *stats["load"]]).double()
        self.world.at(at + "the sums over all ranks")
        self.parallel.finish_gradients()
        stop = sums.new_full((1,), float(self.stop_requested))
        alarm = self.sentinel.alarm() if self.sentinel else torch.zeros_like(stop)
        message = self.world.sum(torch.cat([sums[:2], stop, alarm, sums[2:], self.parallel.squares()]))
        load, squares = self.layout.split(message)
        if self.late:  # a step that is not finite changes nothing on the device, nor does one after it
            self.bad |= ~message.sum().isfinite()
            self.optimizer.found_inf = self.bad.float()  # type: ignore[attr-defined]  # GatedAdamW, or it would not be late
            load = load * ~self.bad  # no expert's bias moves
        else:
            self._examine(self.t + 1, numbers := message.tolist())
        if self.clip_norm is not None:
            self.parallel.scale_gradients((self.clip_norm / squares.sum().sqrt()).clamp(max=1))

        self.world.at(at + "the update")
        self.t += 1  # the update begins here: an error before this line has changed nothing
        lr, caps = float(self.rate["lr"]), [g.get("cap") for g in self.optimizer.param_groups]
        if isinstance(self.optimizer, GatedAdamW):  # torch's AdamW, which the baseline uses, has no diagnostics
            self.optimizer.diagnostics = Diagnostics(d_model=self.run.model.d_model) if diagnose else None
        if self.sentinel:
            self.sentinel.check()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.layout.layers:
            self.model.update_router_bias(load.unbind())
        if self.sentinel:
            self.sentinel.seal()
        self.checkpoints.finish()  # a save in the background has had this step: a crash loses at most one interval

        scales = self._scales(diagnose)
        read = Arriving(torch.cat([message, *scales])).read if self.late else lambda: numbers + [float(x) for x in scales]
        self.unread.append(step := Step(self.t, begin, lr, diagnose, self._diagnostics(caps), read))
        while len(self.unread) > self.late:
            self._read()
        return step.record

    # ---- what a step reports -----------------------------------------------------------------------------------------
    def finish(self) -> None:
        """Read the messages of all steps so far. ValueError if one of them was not finite."""
        while self.unread:
            self._read()

    def _read(self) -> None:
        """Read the oldest message, and fill the record of its step."""
        step = self.unread[0]
        numbers = step.read()
        if self.late:
            self._examine(step.t, numbers)
        self.unread.popleft()
        found, now = Message.of(numbers, self.layout), time.perf_counter()
        elapsed, self.read_at = now - max(step.begin, self.read_at), now
        self.seconds += elapsed
        self.stop = self.stop or found.stop > 0
        tokens = self.loader.batch_size * self.loader.seq_len
        step.record |= {
            "step": step.t,
            "tokens": step.t * tokens,
            "loss": found.loss,
            "lr": step.lr,
            "grad_norm": found.norm,
            "balance": found.balance,
            "tokens_per_s": tokens / elapsed,
            "time": self.seconds,
            **found.report(step.diagnose),
            **step.diagnostics,
        }

    def _examine(self, t: int, numbers: list[float]) -> None:
        """ValueError, on all ranks, if the message of step t is not finite, or if a rank has found damage."""
        found = Message.of(numbers, self.layout)
        if self.sentinel and (found.alarm or not found.finite):
            self.sentinel.verify()  # damaged numbers explain a loss that is not finite
        if not found.finite:
            raise ValueError(self._not_finite(t, found))

    def _scales(self, diagnose: bool) -> list[Tensor]:
        """nGPT: the mean of s_z at every step; with ``diagnose`` also the mean |alpha| of each block."""
        if (s_z := self.model.head.s_z) is None:
            return []
        with torch.no_grad():
            alphas = [b.get_submodule("alpha")().abs() for b in self.model.blocks] if diagnose else []
            return [x.mean().reshape(1) for x in (s_z(), *alphas)]

    def _diagnostics(self, caps: list[float | None]) -> dict[str, list[dict]]:
        """The optimizer's records of this step, one per group, with the group's label and the cap that applied to it."""
        groups, found = self.optimizer.param_groups, getattr(self.optimizer, "diagnostics", None)
        if found is None:
            return {}
        return {"diagnostics": [{**r, "name": groups[r["group"]]["label"], "cap": caps[r["group"]]} for r in found.last]}

    def _not_finite(self, t: int, found: Message) -> str:
        """The error message for a loss or gradient that is not finite. The ranks agree on the first parameter to blame."""
        names = [name for name, _ in self.model.named_parameters()]
        bad = torch.stack([~torch.isfinite(local(p.detach())).all() for p in self.model.parameters()]).float()
        values = self.world.largest(bad).tolist()
        where = "no single parameter"
        gradients = [float(not math.isfinite(x)) for x in found.squares]
        for what, flags in (("the gradient of ", gradients), ("", values)):  # a bad value explains its bad gradients
            if any(flags):
                where = what + names[flags.index(1.0)]
        return (
            f"step {t}: the loss is {found.loss} and {where} is not finite; training stops before the update and nothing "
            "was changed. Resume from the last checkpoint with a lower learning rate (--recipe C=NUMBER, for GPT lr=NUMBER), "
            "or inspect this batch."
        )

    def memory_advice(self) -> str:
        """A sentence that says what to change when memory runs out."""
        less = [n for n in range(1, self.rows) if (self.loader.batch_size // self.world.size) % n == 0]
        ways = [f"--micro-batch {less[-1]}"] if less else []
        if self.run.config.activation_checkpointing != "full":
            ways.append("--activation-checkpointing full")
        ways += ["more ranks (torchrun)", "a smaller model"]
        return f"Use {', '.join(ways[:-1])} or {ways[-1]}."

    # ---- around a step -----------------------------------------------------------------------------------------------
    def validate(self, corpora: list) -> float:
        config = self.run.config
        result = evaluate(self.model, corpora, config.eval_windows, self.rows, config.seq_len, self.world)
        self.parallel.reshard()
        return result.loss

    def save(self) -> None:
        self.finish()  # a step that was not finite is not saved
        self.world.at(f"writing the checkpoint of step {self.t}")
        if self.sentinel:
            self.sentinel.verify()
        state = {"schedule": self.schedule.state_dict(), "data": self.loader.state_dict(), "seconds": self.seconds}
        state |= {"config": self.run.config.to_dict(), "model": self.run.model.to_dict(), "steps": self.run.steps}
        state["run"] = self.run.id
        self.checkpoints.save(self.t, self.model, self.optimizer, state)
        self.saved = self.t

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continue from the checkpoint. ``run.py`` has already accepted a different number of steps."""
        check_belongs(checkpoint, self.run)
        state = checkpoint.state
        self.checkpoints.load(checkpoint, self.model, self.optimizer)
        self.unread.clear()
        self.bad.zero_()
        self.t, self.saved, self.seconds = state["step"], state["step"], state["seconds"]
        try:
            self.loader.load_state_dict(state["data"])
            self.schedule.load_state_dict(state["schedule"], re_anchor=state["steps"] != self.run.steps)
        except (LookupError, TypeError) as error:
            raise Damaged(f"{checkpoint.path / 'state.json'} was damaged or edited ({error!r})") from None
        if self.sentinel:
            self.sentinel.reset()

    def prompt(self) -> Tensor:
        """``sample_prompt`` as tokens [1, T]. ValueError if it cannot be continued."""
        config, tokenizer, limit = self.run.config, self.loader.corpora[0].tokenizer(), self.run.model.max_seq_len
        if config.sample_prompt is None:
            tokens = self._held_out_start(limit)
        else:
            try:
                tokens = tokenizer.encode([config.sample_prompt.encode()])[0]
            except Exception as error:
                raise ValueError(
                    f"--sample-prompt {config.sample_prompt!r} cannot be encoded ({error}): choose another."
                ) from None
        if not len(tokens):
            raise ValueError("--sample-prompt must not be empty; --sample-tokens 0 turns samples off.")
        if limit is not None and len(tokens) + config.sample_tokens > limit:
            raise ValueError(
                f"--sample-tokens {config.sample_tokens} after a prompt of {len(tokens)} tokens exceeds --max-seq-len {limit}: "
                f"set --sample-tokens to at most {max(0, limit - len(tokens))} (0: no samples)."
            )
        return torch.from_numpy(tokens.astype("int64"))[None]

    def _held_out_start(self, limit: int | None) -> np.ndarray:
        """The first tokens of the first document of the held-out split (or of the training split, if nothing is held out)."""
        corpus = self.loader.corpora[0]
        end = corpus.tokenizer().end_of_text
        tokens, document = corpus.stream("val" if corpus.has("val") else "train").read(0, PROMPT)
        room = PROMPT if limit is None else max(1, limit - self.run.config.sample_tokens)
        text = tokens[(document == 0) & (tokens != (-1 if end is None else end))]
        return (text if len(text) else tokens)[:room]

    def sample(self) -> str:
        """``sample_prompt`` and the model's continuation. All ranks call this together: each holds a part of the weights."""
        config, tokenizer = self.run.config, self.loader.corpora[0].tokenizer()
        prompt = self.prompt()
        generator = torch.Generator(self.world.device).manual_seed(config.seed + self.t)
        new = self.model.eval().stream(
            prompt.to(self.world.device),
            config.sample_tokens,
            temperature=0.8,
            stop=tokenizer.end_of_text,
            generator=generator,
        )
        ids = (i for i in map(int, new) if i != tokenizer.end_of_text)
        text = (config.sample_prompt or tokenizer.decode(prompt[0].tolist())) + "".join(
            stream_text(tokenizer, ids, prompt[0].tolist())
        )
        self.model.train()
        self.parallel.reshard()
        return text

    def export(self) -> None:
        """Gather the model on the first rank and write it as a safetensors folder. ValueError if it has left the sphere."""
        if not self.parallel.sharded:
            self.model.check()
        state = self.model.state_dict()
        whole = (gathered(state[name]) for name in stream.ordered(state))  # one at a time, as they are written
        try:
            if self.world.main:
                with new_folder(self.run.folder / "export") as folder:  # complete, or not there
                    save_model(self.model, folder, state, whole)
                    written = write_tokenizer(self.loader.corpora[0].tokenizer(), folder)
                    seal_folder(folder, unseal(folder) | {name: entry(folder / name) for name in written})
        except OSError as error:
            raise ValueError(
                f"the model could not be written to {self.run.folder / 'export'}: {error}; resume to try again."
            ) from None
        finally:
            deque(whole, maxlen=0)  # all ranks gather every tensor, those that do not write it too
        self.world.barrier()
