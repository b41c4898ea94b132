"""An exact, reproducible count of the memory of tensors, for devices whose allocator does not count (the CPU)."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not declare it
    """Counts the bytes of all storages that operations have made and that are still alive, and their peak.

    The count is the same in every run, unlike resident memory, which depends on what the process did before, on the
    system's allocator and on other threads. It does not see scratch memory inside a kernel; storages that FSDP2 frees
    in place count until they are dropped, so that FSDP2 counts as if all layers were gathered.

    Args:
        tensors: what is there already, such as parameters and the optimizer's state.

    Example:
        >>> with LiveBytes([]) as live:
        ...     one = torch.zeros(1000)
        ...     two = one + 1
        ...     del one
        ...     three = two.view(10, 100)
        >>> live.peak, live.now
        (8000, 4000)
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self.now = 0
        self.peak = 0
        for tensor in tensors:
            self._count(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count what it returns."""
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self._count(value)
        return result

    def _count(self, tensor: Tensor) -> None:
        for part in _dense_parts(tensor):
            self._count_storage(part.untyped_storage())

    def _count_storage(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        num_bytes = storage.nbytes()
        _, counted = self._storages.get(key, (None, 0))
        if num_bytes <= counted:
            return
        self._storages[key] = (weakref.ref(storage, lambda _: self._forget(key)), num_bytes)
        self.now += num_bytes - counted
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        _, num_bytes = self._storages.pop(key, (None, 0))
        self.now -= num_bytes


def _dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors with storage of their own that a tensor consists of: of a sparse one its indices and values."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if local.layout is torch.sparse_coo:
        return local._indices(), local._values()
    if local.layout in (torch.sparse_csr, torch.sparse_bsr):
        return local.crow_indices(), local.col_indices(), local.values()
    if local.layout in (torch.sparse_csc, torch.sparse_bsc):
        return local.ccol_indices(), local.row_indices(), local.values()
    return (local,)
