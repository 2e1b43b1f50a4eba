"""What if memory runs out? Then the user reads what to lower, instead of a traceback from deep inside torch.

torch has no one error for it: ``torch.OutOfMemoryError`` on a GPU, a plain RuntimeError of the allocator on a CPU; Python has
MemoryError.
"""

import contextlib
from collections.abc import Iterator

__all__ = ["OutOfMemory", "ran_out", "room_for"]

_WORDS = ("out of memory", "can't allocate memory", "not enough memory", "bad_alloc", "ALLOC_FAILED")


class OutOfMemory(ValueError):
    """Memory ran out; the text says when, and what to lower."""


def ran_out(error: BaseException) -> bool:
    """Whether this is an error of a memory that is full."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS))


@contextlib.contextmanager
def room_for(what: str, advice: str) -> Iterator[None]:
    """Turns an error of a full memory in the block into ``OutOfMemory`` with the advice."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        error.__traceback__ = None  # its frames hold the tensors that filled the memory
        reason = (str(error).splitlines() or ["no room"])[0].rpartition("DefaultCPUAllocator: ")[2]
        raise OutOfMemory(f"{what}: out of memory ({reason}). {advice}") from None
