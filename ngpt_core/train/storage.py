"""How do the tensors of a checkpoint get into files and back, without pickle and from any number of ranks?

This is the storage beneath PyTorch's Distributed Checkpoint, whose planner decides which rank writes and reads which part. Each
rank writes safetensors files, one for each kind of tensor (the first word of its name):

    model-00000.safetensors, optimizer-00000.safetensors, random-00000.safetensors, model-00001.safetensors, ...
    index.json    every tensor with its dtype, shape and parts; a part is [file, offset in the tensor, shape]

In a file, a part is called NAME@OFFSET. The index is checked before a byte is read: the parts must fill each tensor, and the
files must be large enough for their parts.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ..files import read_json, write_text
from ..nn.stream import DTYPES, NAMES, write
from ..seal import Entry, entry

__all__ = ["INDEX", "Reader", "Writer", "read_index"]

INDEX = "index.json"


def _done(value: Any) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


def _key(name: str, offset: Any) -> str:
    return f"{name}@{','.join(map(str, offset))}"


# ---- writing ---------------------------------------------------------------------------------------------------------
class Writer(StorageWriter, BlockingAsyncStager):
    """Writes this rank's parts. On the first rank ``files`` then lists every file of the checkpoint, index.json included."""

    def __init__(self, folder: Path):
        super().__init__()
        self.folder = folder
        self.files: dict[str, Entry] = {}

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [SavePlan(plan.items, rank, plan.planner_data, plan.usable) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        by_file: dict[str, list[WriteItem]] = {}
        for item in plan.items:
            if item.tensor_data is None:
                raise TypeError(f"{item.index.fqn} is not a tensor: a checkpoint holds nothing else")
            by_file.setdefault(f"{item.index.fqn.partition('.')[0]}-{plan.storage_data:05d}.safetensors", []).append(item)
        results = []
        for name, items in by_file.items():
            written = _write(self.folder / name, items, planner)
            results += [WriteResult(item.index, 0, (name, written)) for item in items]
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank: write index.json."""
        where = {(r.index.fqn, r.index.offset): r.storage_data for rank in results for r in rank}
        tensors = {}
        for name, x in metadata.state_dict_metadata.items():
            assert isinstance(x, TensorStorageMetadata)
            parts = [[where[name, c.offsets][0], list(c.offsets), list(c.sizes)] for c in x.chunks]
            tensors[name] = {"dtype": NAMES[x.properties.dtype], "shape": list(x.size), "parts": parts}
        write_text(
            self.folder / INDEX, "{" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in tensors.items()) + "}\n"
        )
        self.files = dict(sorted(where.values())) | {INDEX: entry(self.folder / INDEX)}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


def _write(path: Path, items: list[WriteItem], planner: SavePlanner) -> Entry:
    """Write the parts as a safetensors file, one after the other: no second copy is in memory."""
    items = sorted(items, key=lambda item: (-_dtype(item).itemsize, item.index.fqn, tuple(item.index.offset or ())))
    shapes = [item.tensor_data.chunk.sizes for item in items]  # type: ignore[union-attr]  # checked by write_data
    names = [_key(item.index.fqn, item.index.offset or ()) for item in items]
    parts = (planner.resolve_data(item) for item in items)
    return write(path, {k: (_dtype(i), n) for k, i, n in zip(names, items, shapes)}, parts)  # type: ignore[arg-type]  # tensors


def _dtype(item: WriteItem) -> torch.dtype:
    return item.tensor_data.properties.dtype  # type: ignore[union-attr]  # checked by write_data


# ---- reading ---------------------------------------------------------------------------------------------------------
def read_index(folder: Path, files: dict[str, Entry]) -> dict[str, TensorStorageMetadata]:
    """Every tensor in index.json, with its parts. ValueError if they are not whole."""
    tensors, room = {}, {name: about["bytes"] for name, about in files.items()}
    for name, about in read_json(folder / INDEX).items():
        try:
            dtype, shape = DTYPES[about["dtype"]], torch.Size(about["shape"])
            chunks = [_Part(torch.Size(offset), torch.Size(sizes), file) for file, offset, sizes in about["parts"]]
            for part in chunks:
                room[part.file] -= math.prod(part.sizes) * dtype.itemsize
                if room[part.file] < 0:
                    raise ValueError(f"{INDEX} and {part.file} disagree about {name}")
        except (LookupError, TypeError) as error:
            raise ValueError(f"{INDEX} does not describe {name} as a tensor in these files ({error!r})") from None
        if not _is_whole(shape, chunks):
            raise ValueError(f"{INDEX} does not have all of {name}")
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype), shape, list(chunks))
    return tensors


def _is_whole(shape: torch.Size, parts: list["_Part"]) -> bool:
    """Whether the parts are a grid that fills the tensor: each dimension is cut at the same places everywhere, without a gap
    or an overlap, and each combination of the pieces is there once."""
    parts = [part for part in parts if 0 not in part.sizes]  # a rank may hold nothing of a small tensor
    if 0 in shape or any(len(part.sizes) != len(shape) or len(part.offsets) != len(shape) for part in parts):
        return not parts
    cells = 1
    for i, length in enumerate(shape):
        cuts, end = sorted({(part.offsets[i], part.sizes[i]) for part in parts}), 0
        for begin, size in cuts:
            if begin != end or size < 0:
                return False
            end = begin + size
        if end != length:
            return False
        cells *= len(cuts)
    return len({part.offsets for part in parts}) == len(parts) == cells


class _Part(ChunkStorageMetadata):
    """A part of a tensor, and the file that has it."""

    def __init__(self, offsets: torch.Size, sizes: torch.Size, file: str):
        super().__init__(offsets, sizes)
        self.file = file


class Reader(StorageReader):
    """Reads the parts that this rank needs."""

    def __init__(self, folder: Path, tensors: dict[str, TensorStorageMetadata]):
        self.folder, self.tensors = folder, tensors

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None: ...

    def read_metadata(self) -> Metadata:
        return Metadata(dict(self.tensors))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        files = {
            (name, part.offsets): part.file for name, x in self.tensors.items() for part in x.chunks if isinstance(part, _Part)
        }
        wanted: dict[str, list] = {}
        for item in plan.items:
            wanted.setdefault(files[item.storage_index.fqn, item.storage_index.offset or torch.Size()], []).append(item)
        for name, items in wanted.items():
            with safe_open(self.folder / name, "pt") as file:
                for item in items:
                    index, x = item.storage_index, self.tensors[item.storage_index.fqn]
                    part = next(p for p in x.chunks if p.offsets == index.offset)
                    key, target = _key(index.fqn, part.offsets), planner.resolve_tensor(item).detach()
                    stored = file.get_slice(key)
                    if stored.get_shape() != list(part.sizes) or stored.get_dtype() != NAMES[x.properties.dtype]:
                        raise ValueError(f"{name} and {INDEX} disagree about the shape or dtype of {index.fqn}")
                    rows = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths))
                    target.copy_(stored[rows] if rows else file.get_tensor(key))
                    planner.commit_tensor(item, target)
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True
