"""What happens in one training step? ``Trainer.step`` fits on one screen; its parts are in other files.

    data/          which tokens                      recipe/         optimizer, learning rates, schedule (the paper's recipe)
    parallel.py    many ranks                        checkpoint.py   saving and resuming
    evaluate.py    the held-out loss                 sentinel.py     damaged numbers
    loop.py        the run around the step           watchdog.py     ranks that hang

Symbols: t the step, counted from 1; B sequences of T tokens in a global batch. "The message" is the single all-reduce of a
step's statistics, by which the ranks also agree on when to stop.
"""

import math
import time

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from .. import recipe
from ..data.loader import Loader
from ..data.tokenizers import stream_text
from ..files import new_folder
from ..nn.documents import pack
from ..nn.io import save as save_model
from ..nn.model import LanguageModel
from ..optim.diagnostics import Diagnostics
from ..optim.gated_adamw import GatedAdamW
from ..optim.sharding import local
from ..rehearsal import rehearsing
from ..seal import Damaged, entry, seal_folder, unseal
from .checkpoint import Checkpoint, Checkpoints
from .config import recipe_numbers
from .evaluate import evaluate
from .parallel import initialize, parallelize
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

    def step(self, diagnose: bool = False) -> dict:
        """One optimizer step; ``diagnose`` also collects the optimizer's diagnostics. Returns the step's numbers."""
        begin, at = time.perf_counter(), f"step {self.t + 1}: "
        self.world.at(at + "reading the batch")
        batch = self.loader.next()
        denominator = max(1.0, float(self.world.sum(batch.counted.to(self.world.device))))  # targets in the global batch
        sums, load = torch.zeros(3, device=self.world.device, dtype=torch.float64), list[Tensor]()
        micro_batches = batch.split(self.rows)
        for i, micro in enumerate(micro_batches):
            self.world.at(f"{at}micro-batch {i + 1}")
            self.parallel.micro_batch(last=i == len(micro_batches) - 1)
            x = micro.to(self.world.device)
            packed = bool(micro.documents.any())  # one document per row: plain causal attention is faster
            documents = pack(micro.documents, self.world.device) if packed else None
            self.model.loss(x.tokens, x.targets, documents, denominator=denominator).backward()
            stats: dict = self.model.stats
            sums[:2] += torch.stack([stats["cross_entropy"], stats["balance"]]).double()
            load = [x + y for x, y in zip(load, stats["load"])] if load else list(stats["load"])
        self.world.at(at + "the sums over all ranks")
        self.parallel.finish_gradients()

        sums[2] = float(self.stop_requested)
        alarm = self.sentinel.alarm() if self.sentinel else sums.new_zeros(1)
        message = self.world.sum(torch.cat([sums, alarm, *(x.double() for x in load)]))
        (loss, balance, stop, found), load = message[:4].tolist(), list(message[4:].split([len(x) for x in load]))
        norm = float(self.parallel.grad_norm())
        if self.sentinel and (found or not math.isfinite(loss + norm)):
            self.sentinel.verify()  # damaged numbers explain a loss that is not finite
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise ValueError(self._not_finite(loss))
        if self.clip_norm is not None and norm > self.clip_norm:
            for p in self.model.parameters():
                if p.grad is not None:
                    p.grad.mul_(self.clip_norm / norm)

        self.world.at(at + "the update")
        self.t += 1  # the update begins here: an error before this line has changed nothing
        lr = float(self.rate["lr"])
        caps, diagnostics = [g.get("cap") for g in self.optimizer.param_groups], None
        if isinstance(self.optimizer, GatedAdamW):  # torch's AdamW, which the baseline uses, has no diagnostics
            diagnostics = self.optimizer.diagnostics = Diagnostics(d_model=self.run.model.d_model) if diagnose else None
        if self.sentinel:
            self.sentinel.check()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        if load:
            self.model.update_router_bias(load)
        if self.sentinel:
            self.sentinel.seal()
        self.checkpoints.finish()  # a save in the background has had this step: a crash loses at most one interval
        self.stop = stop > 0
        elapsed = time.perf_counter() - begin
        self.seconds += elapsed
        tokens = self.loader.batch_size * self.loader.seq_len
        return {
            "step": self.t,
            "tokens": self.t * tokens,
            "loss": loss,
            "lr": lr,
            "grad_norm": norm,
            "balance": balance,
            "tokens_per_s": tokens / elapsed,
            "time": self.seconds,
            **self._routers(load, diagnose),
            **self._scales(diagnose),
            **({"diagnostics": self._labeled(diagnostics.last, caps)} if diagnostics is not None else {}),
        }

    # ---- what a step reports -----------------------------------------------------------------------------------------
    def _routers(self, load: list[Tensor], diagnose: bool) -> dict[str, object]:
        """Per MoE layer: the largest load over the mean, and the number of experts that received no token."""
        if not load:
            return {}
        found = {"load_max": [float(x.max() / x.mean()) for x in load], "dead_experts": [int((x == 0).sum()) for x in load]}
        return found | ({"load": [x.tolist() for x in load]} if diagnose else {})

    def _scales(self, diagnose: bool) -> dict[str, object]:
        """nGPT: the mean of s_z at every step; with ``diagnose`` also the mean |alpha| of each block."""
        if (s_z := self.model.head.s_z) is None:
            return {}
        with torch.no_grad():
            found: dict[str, object] = {"s_z": float(s_z().mean())}
            if diagnose:
                found["alpha"] = [float(b.get_submodule("alpha")().abs().mean()) for b in self.model.blocks]
            return found

    def _labeled(self, records: list[dict], caps: list[float | None]) -> list[dict]:
        """The optimizer's records, one per group, with the group's label and the cap that applied to it."""
        groups = self.optimizer.param_groups
        return [{**r, "name": groups[r["group"]]["label"], "cap": caps[r["group"]]} for r in records]

    def _not_finite(self, loss: float) -> str:
        """The error message for a loss or gradient that is not finite. The ranks agree on the first parameter to blame."""
        named = list(self.model.named_parameters())
        bad = torch.zeros(2, len(named), device=self.world.device)
        for i, (_, p) in enumerate(named):
            for row, x in enumerate((p.detach(), p.grad)):
                if x is not None:
                    bad[row, i] = float(not bool(torch.isfinite(local(x)).all()))
        values, gradients = self.world.largest(bad).tolist()
        where = "no single parameter"
        for what, flags in (("the gradient of ", gradients), ("", values)):  # a bad value explains its bad gradients
            if any(flags):
                where = what + named[flags.index(1.0)][0]
        return (
            f"step {self.t + 1}: the loss is {loss} and {where} is not finite; training stops before the update and nothing "
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
        self.t, self.saved, self.seconds = state["step"], state["step"], state["seconds"]
        try:
            self.loader.load_state_dict(state["data"])
            self.schedule.load_state_dict(state["schedule"], re_anchor=state["steps"] != self.run.steps)
        except (LookupError, TypeError) as error:
            raise Damaged(f"{checkpoint.path / 'state.json'} was damaged or edited ({error!r}): restore it.") from None
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
            use_cache=not self.parallel.sharded,
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
        state = {}
        for name, x in self.model.state_dict().items():
            x = x.full_tensor() if hasattr(x, "full_tensor") else x
            if self.world.main:
                state[name] = x.detach().cpu()
        if self.world.main:
            try:
                with new_folder(self.run.folder / "export") as folder:  # complete, or not there
                    save_model(self.model, folder, state)
                    written = write_tokenizer(self.loader.corpora[0].tokenizer(), folder)
                    seal_folder(folder, unseal(folder) | {name: entry(folder / name) for name in written})
            except (OSError, SafetensorError) as error:
                raise ValueError(
                    f"the model could not be written to {self.run.folder / 'export'}: {error}; resume to try again."
                ) from None
        self.world.barrier()
