"""How does a model do on the tasks of lm-evaluation-harness? What ``ngpt eval --tasks`` computes.

The model runs as ``NGPTForCausalLM``; a folder that ``ngpt export`` wrote gives the same numbers with
``lm_eval --model hf --model_args pretrained=FOLDER,trust_remote_code=True``.
"""

import json
from typing import Any

from ..hf.convert import to_transformers
from ..train.trained import open_model, pick_device

__all__ = ["run_tasks", "tasks_text"]


def run_tasks(
    folder: str, tasks: list[str], task_folder: str | None, rows: int, limit: int | None, device: str, tokenizer: str | None
) -> dict[str, dict[str, Any]]:
    """Task -> its metrics."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

        from ..hf.tokenizer import transformers_tokenizer
    except ImportError as error:
        need = f'--tasks needs lm-evaluation-harness and transformers ({error}): pip install "ngpt-core[eval]"'
        raise ValueError(f"{need}, or leave the flag out.") from None
    model, own_tokenizer = open_model(folder, pick_device(device), tokenizer)
    converted = transformers_tokenizer(own_tokenizer)
    theirs = to_transformers(model, eos_token_id=converted.eos_token_id, pad_token_id=converted.pad_token_id)
    manager = TaskManager(include_path=task_folder)
    if unknown := sorted(set(tasks) - set(manager.all_tasks)):
        raise ValueError(f"there is no task {', '.join(unknown)}: `lm_eval ls tasks` lists them; --task-folder adds your own.")
    harness = HFLM(pretrained=theirs.to(model.embedding.weight.device), tokenizer=converted, batch_size=rows)
    found = simple_evaluate(harness, tasks=tasks, task_manager=manager, limit=limit, bootstrap_iters=0)
    return {task: {k: v for k, v in metrics.items() if k != "alias"} for task, metrics in found["results"].items()}


def tasks_text(scores: dict[str, dict[str, Any]], as_json: bool) -> str:
    """The scores as ``ngpt eval`` prints them."""
    if as_json:
        return json.dumps(scores)
    rows = [(task, name.partition(",")[0], value) for task, metrics in scores.items() for name, value in metrics.items()]
    numbers = [row for row in rows if isinstance(row[2], int | float)]
    return "\n".join(f"{task:24}  {name:20}  {value:.4f}" for task, name, value in numbers)
