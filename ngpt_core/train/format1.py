"""How do we read a checkpoint that an older version wrote with pickle, without running code that may be in it?

Format 1 was PyTorch's own: ``.metadata`` is a pickle, which can call any function. Here it is read by an unpickler that knows
only the classes of that file: anything else in it is an error. The tensors are read with ``weights_only=True``, which torch
restricts in the same way, and an entry that is not a tensor is refused.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from ..seal import is_plain

__all__ = ["OldReader", "read_random"]

_METADATA = ("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
             "_MEM_FORMAT_ENCODING")  # fmt: skip
_ADMITTED = {("torch.distributed.checkpoint.metadata", name) for name in _METADATA}
_ADMITTED |= {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"), ("pathlib", "WindowsPath"), ("pathlib._local", "PosixPath"), ("pathlib._local", "WindowsPath"),
}  # fmt: skip
_DTYPES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class _Unpickler(pickle._Unpickler):  # Python's: the one in C allocates as much memory as a damaged byte asks for
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ADMITTED or (module == "torch" and name in _DTYPES):
            return super().find_class(module, name)
        raise ValueError(f".metadata names {module}.{name}, which does not belong in a checkpoint; it is not run")


class OldReader(FileSystemReader):
    """Distributed Checkpoint's reader of format 1 with a restricted unpickler."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        try:
            metadata = _Unpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()
        except MemoryError:
            raise ValueError(".metadata was damaged: it asks for more memory than there is") from None
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise ValueError(".metadata does not describe a checkpoint")
        for name, x in metadata.state_dict_metadata.items():
            if not isinstance(x, TensorStorageMetadata):
                raise ValueError(f".metadata: {name} is not a tensor")
        for info in metadata.storage_data.values():
            if not is_plain(info.relative_path) or info.transform_descriptors:
                raise ValueError(f".metadata names the file {info.relative_path!r}, which is not one of this folder")
        metadata.storage_meta, self._metadata = StorageMeta(), metadata
        self.tensors: dict[str, TensorStorageMetadata] = dict(metadata.state_dict_metadata)  # type: ignore[arg-type]  # checked

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


def read_random(folder: Path, rank: int) -> dict[str, torch.Tensor]:
    """The random states that a rank saved."""
    return torch.load(folder / f"rng-{rank:05d}.pt", weights_only=True)
