"""How do TensorBoard, Weights & Biases and MLflow follow a run? Each is a callback (``callbacks.py``).

They receive every number of a step, the optimizer's diagnostics and the samples. A resumed run continues its own record:
TensorBoard drops the events of steps that are trained again; the ids of W&B and MLflow are kept in RUN/wandb.json and
RUN/mlflow.json. (W&B ignores steps that it has already seen, so after a crash its curve keeps the first version of them.)
"""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import read_json, write_json
from .callbacks import Callback

if TYPE_CHECKING:
    from .run import Run

__all__ = ["MLflow", "TensorBoard", "WandB", "check_installed", "flat"]


def check_installed(flag: str, package: str, value: str | None) -> None:
    """ValueError if a flag asks for a package that is not installed. Called before anything is written."""
    if value and find_spec(package) is None:
        raise ValueError(f"{flag} {value} needs the package {package}: pip install {package}, or leave it out.")


def flat(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a step: lists by position, diagnostics by the name of their group."""
    found: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, bool | int | float):
            found[key] = float(value)
        elif key == "diagnostics":
            for group in value:
                found |= {f"diagnostics/{group['name']}/{k}": float(v) for k, v in group.items() if _logged(k, v)}
        elif isinstance(value, list) and value and isinstance(value[0], int | float):
            found |= {f"{key}/{i}": float(x) for i, x in enumerate(value)}
    return found


def _logged(key: str, value: object) -> bool:
    return key not in ("group", "step") and isinstance(value, int | float)


def _config(run: "Run") -> dict[str, Any]:
    """What the run was started with, for the services' tables."""
    return {"steps": run.steps, **{f"model.{k}": v for k, v in run.model.to_dict().items()}, **run.config.to_dict()}


class TensorBoard(Callback):
    """Events in RUN/tensorboard, if the package is installed; metrics.jsonl has everything in any case."""

    def start(self, run: "Run", after: int) -> None:
        self.board: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        self.board = SummaryWriter(str(run.folder / "tensorboard"), purge_step=after + 1 if after else None)

    def step(self, record: dict[str, Any]) -> None:
        if self.board is not None:
            for key, value in flat(record).items():
                self.board.add_scalar(key, value, record["step"])

    def sample(self, step: int, text: str) -> None:
        if self.board is not None:
            self.board.add_text("sample", text, step)

    def end(self, step: int, finished: bool) -> None:
        if self.board is not None:
            self.board.close()


class WandB(Callback):
    """Weights & Biases: one run per folder, continued on --resume."""

    def __init__(self, project: str):
        self.project = project

    def start(self, run: "Run", after: int) -> None:
        import wandb

        stored = run.folder / "wandb.json"
        known = _stored(stored, self.project)
        options = {"project": self.project, "dir": str(run.folder), "name": run.folder.name, "config": _config(run)}
        try:
            self.run: Any = wandb.init(id=known, resume="allow", **options)
        except Exception as error:  # no network, no login: it raises its own errors
            raise ValueError(f"--wandb {self.project} cannot be reached ({error}): log in to it, or leave it out.") from None
        write_json(stored, {"name": self.project, "id": self.run.id})

    def step(self, record: dict[str, Any]) -> None:
        self.run.log(flat(record), step=record["step"])

    def sample(self, step: int, text: str) -> None:
        import wandb

        self.run.log({"sample": wandb.Html(f"<pre>{_escaped(text)}</pre>")}, step=step)

    def end(self, step: int, finished: bool) -> None:
        self.run.finish(exit_code=0 if finished else 143)


class MLflow(Callback):
    """MLflow: one run per folder, continued on --resume. MLFLOW_TRACKING_URI selects the server, as always in MLflow."""

    def __init__(self, experiment: str):
        self.experiment = experiment

    def start(self, run: "Run", after: int) -> None:
        import mlflow

        self.mlflow: Any = mlflow
        stored = run.folder / "mlflow.json"
        known = _stored(stored, self.experiment)
        try:
            mlflow.set_experiment(self.experiment)
            begun = mlflow.start_run(run_id=known, run_name=None if known else run.folder.name)
            if known is None:
                mlflow.log_params({name: str(value)[:500] for name, value in _config(run).items()})
        except Exception as error:
            raise ValueError(f"--mlflow {self.experiment} cannot be reached ({error}): see MLFLOW_TRACKING_URI.") from None
        write_json(stored, {"name": self.experiment, "id": begun.info.run_id})

    def step(self, record: dict[str, Any]) -> None:
        self.mlflow.log_metrics(flat(record), step=record["step"])

    def sample(self, step: int, text: str) -> None:
        self.mlflow.log_text(text, f"samples/{step:08d}.txt")

    def end(self, step: int, finished: bool) -> None:
        self.mlflow.end_run("FINISHED" if finished else "KILLED")


def _stored(path: Path, name: str) -> str | None:
    """The id of the run in this folder, if it was reported under the same name before."""
    if not path.is_file() or (found := read_json(path)).get("name") != name:
        return None
    return str(found["id"])


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
