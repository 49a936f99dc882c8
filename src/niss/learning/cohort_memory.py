"""Memory that worker processes share: files without a name, which vanish with the last process."""

from __future__ import annotations

import mmap
import os
import tempfile

import torch
from torch import Tensor

_CACHE_LINE = 64


class SharedMemory:
    """A nameless file whose descriptor child processes inherit; `resize` and `tensor` work on either side.

    There is nothing to unlink: even after `kill -9` of every process the kernel takes it back.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _nameless_file() if descriptor is None else descriptor
        self._map: mmap.mmap | None = None

    def resize(self, size: int) -> None:
        """Make room for `size` bytes (it never shrinks); tensors made before keep their old map."""
        if size > os.fstat(self.descriptor).st_size:
            os.ftruncate(self.descriptor, size)

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], *, offset: int = 0) -> Tensor:
        """A tensor on this memory, from byte `offset` on; others see what is written into it."""
        count = 1
        for extent in shape:
            count *= extent
        size = os.fstat(self.descriptor).st_size
        if self._map is None or len(self._map) < size:
            self._map = mmap.mmap(self.descriptor, size)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(shape)

    def rows(self, dtype: torch.dtype, count: int, length: int) -> Tensor:
        """`count` vectors, making room where needed; each begins on a cache line, as a tensor of its own does.

        Products round differently from other addresses: without this, a worker's last bits would differ.
        """
        item = torch.empty(0, dtype=dtype).element_size()
        padded = -(-length * item // _CACHE_LINE) * _CACHE_LINE // item
        self.resize(count * padded * item)
        return self.tensor(dtype, (count, padded))[:, :length]

    def close(self) -> None:
        """Give the descriptor back; tensors still in use keep their memory."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("niss-cohort")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
