"""How is one step of training made? ``Trainer.step``, on one screen, from parts that are in other files.

    data/          which tokens                      recipe/         optimizer, learning rates, schedule (the paper's recipe)
    parallel.py    many ranks                        checkpoint.py   surviving
    evaluate.py    the held-out loss                 loop.py         the run around the step

Symbols: t the step, counted from 1; B sequences of T tokens in a global batch; "the message" is the only all-reduce of a step's
statistics: with it the ranks also agree on when to stop.
"""

import math
import time

import torch
from safetensors import SafetensorError
from torch import Tensor

from .. import recipe
from ..data.loader import Loader
from ..data.tokenizers import stream_text
from ..nn.io import save as save_model
from ..nn.model import LanguageModel
from ..optim.diagnostics import Diagnostics
from ..optim.gated_adamw import GatedAdamW
from ..optim.sharding import local
from .checkpoint import Checkpoint, Checkpoints
from .config import recipe_numbers
from .evaluate import evaluate
from .parallel import initialize, parallelize
from .run import Run
from .world import World

__all__ = ["Trainer"]


class Trainer:
    """A model with everything that one optimizer step needs."""

    def __init__(self, run: Run, world: World, corpora: list):
        self.run, self.world, config = run, world, run.config
        self.t = self.saved = 0  # steps that were made, and that the newest checkpoint has
        self.seconds = 0.0  # of training, over all sessions of the run
        self.asked = False  # a signal asked this process to stop
        self.stop = False  # a signal asked one of the ranks: all stop after the same step
        self.loader = Loader(corpora, config.batch_size, config.seq_len, "train", config.seed, world.rank, world.size)
        share = config.batch_size // world.size
        self.rows = config.micro_batch or share
        if share % self.rows:
            raise ValueError(
                f"a rank's share of {share} sequences does not divide into micro-batches of {self.rows}: set --micro-batch."
            )
        with torch.device("meta"):
            self.model = LanguageModel(run.model)
        self.parallel = parallelize(self.model, config, world)
        initialize(self.model, config.seed, world.device)
        numbers = recipe_numbers(config, run.model, run.steps)
        self.optimizer, self.schedule = recipe.build(self.model, run.steps, numbers)
        self.clip_norm = numbers.clip_norm
        # the metrics show the rate of the input embedding, which in both recipes is the global one
        self.rate = next(g for g in self.optimizer.param_groups if "embedding.weight" in g["param_names"])
        self.checkpoints = Checkpoints(run.folder, world, config.keep, config.keep_every, config.async_save)

    def step(self, look: bool = False) -> dict:
        """One optimizer step; ``look`` also collects the optimizer's diagnostics. Returns the step's numbers."""
        begin = time.perf_counter()
        batch = self.loader.next()
        denominator = max(1.0, float(self.world.sum(batch.counted.to(self.world.device))))  # targets in the global batch
        sums, load = torch.zeros(4, device=self.world.device, dtype=torch.float64), list[Tensor]()
        micro_batches = batch.split(self.rows)
        for i, micro in enumerate(micro_batches):
            self.parallel.micro_batch(last=i == len(micro_batches) - 1)
            x = micro.to(self.world.device)
            documents = x.documents if bool(micro.documents.any()) else None  # one per row: attention is plainly causal, faster
            self.model.loss(x.tokens, x.targets, documents, denominator=denominator).backward()
            stats: dict = self.model.stats
            sums[:2] += torch.stack([stats["cross_entropy"], stats["balance"]]).double()
            load = [x + y for x, y in zip(load, stats["load"])] if load else list(stats["load"])
        self.parallel.finish_gradients()

        sums[2:] = torch.tensor([float(self.asked), float(self.checkpoints.ready)])
        message = self.world.sum(torch.cat([sums, *(x.double() for x in load)]))
        (loss, balance, stop, ready), load = message[:4].tolist(), list(message[4:].split([len(x) for x in load]))
        norm = float(self.parallel.grad_norm())
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise ValueError(self._not_finite(loss))
        if self.clip_norm is not None and norm > self.clip_norm:
            for p in self.model.parameters():
                if p.grad is not None:
                    p.grad.mul_(self.clip_norm / norm)

        self.t += 1  # the update begins here: an error before this line has changed nothing
        lr = float(self.rate["lr"])
        caps, diagnostics = [g.get("cap") for g in self.optimizer.param_groups], None
        if isinstance(self.optimizer, GatedAdamW):  # the baseline's, torch's AdamW, has no diagnostics
            diagnostics = self.optimizer.diagnostics = Diagnostics(d_model=self.run.model.d_model) if look else None
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        if load:
            self.model.update_router_bias(load)
        if ready == self.world.size:
            self.checkpoints.finish()
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
            **self._routers(load, look),
            **self._scales(look),
            **({"diagnostics": self._labelled(diagnostics.last, caps)} if diagnostics is not None else {}),
        }

    # ---- what a step reports -----------------------------------------------------------------------------------------
    def _routers(self, load: list[Tensor], look: bool) -> dict[str, object]:
        """Per MoE layer: the largest load over the mean, and the number of experts that received no token."""
        if not load:
            return {}
        found = {"load_max": [float(x.max() / x.mean()) for x in load], "dead_experts": [int((x == 0).sum()) for x in load]}
        return found | ({"load": [x.tolist() for x in load]} if look else {})

    def _scales(self, look: bool) -> dict[str, object]:
        """nGPT: the mean of s_z at every step; with the diagnostics also the mean |alpha| of each block."""
        if (s_z := self.model.head.s_z) is None:
            return {}
        with torch.no_grad():
            found: dict[str, object] = {"s_z": float(s_z().mean())}
            if look:
                found["alpha"] = [float(b.get_submodule("alpha")().abs().mean()) for b in self.model.blocks]
            return found

    def _labelled(self, records: list[dict], caps: list[float | None]) -> list[dict]:
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
            "or look at this batch."
        )

    def memory_advice(self) -> str:
        """What to change when memory runs out, as a sentence."""
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
        state = {"schedule": self.schedule.state_dict(), "data": self.loader.state_dict(), "seconds": self.seconds}
        state |= {"config": self.run.config.to_dict(), "model": self.run.model.to_dict(), "steps": self.run.steps}
        self.checkpoints.save(self.t, self.model, self.optimizer, state)
        self.saved = self.t

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continue from the checkpoint. A different number of steps was accepted before (run.py)."""
        state = checkpoint.state
        self.checkpoints.load(checkpoint, self.model, self.optimizer)
        self.t, self.saved, self.seconds = state["step"], state["step"], state["seconds"]
        try:
            self.loader.load_state_dict(state["data"])
            self.schedule.load_state_dict(state["schedule"], re_anchor=state["steps"] != self.run.steps)
        except (LookupError, TypeError) as error:
            problem = f"{checkpoint.path / 'state.json'} was damaged or edited ({error!r})"
            raise ValueError(f"{problem}: restore it, or remove the checkpoint to use an older one.") from None

    def prompt(self) -> Tensor:
        """``sample_prompt`` as tokens [1, T]. ValueError if it cannot be continued."""
        config, tokenizer, limit = self.run.config, self.loader.corpora[0].tokenizer(), self.run.model.max_seq_len
        try:
            tokens = tokenizer.encode([config.sample_prompt.encode()])[0]
        except Exception as error:
            raise ValueError(f"--sample-prompt {config.sample_prompt!r} cannot be encoded ({error}): choose another.") from None
        if not len(tokens):
            raise ValueError("--sample-prompt must not be empty; --sample-tokens 0 turns samples off.")
        if limit is not None and len(tokens) + config.sample_tokens > limit:
            raise ValueError(
                f"--sample-tokens {config.sample_tokens} after a prompt of {len(tokens)} exceeds --max-seq-len {limit}: "
                f"set --sample-tokens to at most {max(0, limit - len(tokens))} (0: no samples)."
            )
        return torch.from_numpy(tokens.astype("int64"))[None]

    def sample(self) -> str:
        """``sample_prompt`` and the model's continuation. All ranks call this together: the weights are divided among them."""
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
        text = config.sample_prompt + "".join(stream_text(tokenizer, ids, prompt[0].tolist()))
        self.model.train()
        self.parallel.reshard()
        return text

    def export(self) -> None:
        """Write the whole model as one safetensors folder, gathered on the first rank. ValueError if it left the sphere."""
        if not self.parallel.sharded:
            self.model.check()
        state = {}
        for name, x in self.model.state_dict().items():
            x = x.full_tensor() if hasattr(x, "full_tensor") else x
            if self.world.main:
                state[name] = x.detach().cpu()
        if self.world.main:
            try:
                save_model(self.model, self.run.folder / "export", state)
            except (OSError, SafetensorError) as error:
                raise ValueError(
                    f"the model could not be written to {self.run.folder / 'export'}: {error}; resume to try again."
                ) from None
        self.world.barrier()
