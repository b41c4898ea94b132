"""Put a module and its optimizers back as they were, after micro-batches that must not count."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Restore = Callable[[], None]


class Snapshot:
    """What training changes in a module and its optimizers; :meth:`restore` undoes it exactly.

    Kept are parameters, buffers, gradients, the state and options of the optimizers, and the attributes of every
    submodule: which object each one is, and the contents of tensors, lists, dictionaries and sets (states of
    torchmetrics, counters, logs of a ``training_step``). Contents of other objects are not known and not touched.
    Copies of tensors are kept in main memory, so that the accelerator's memory is free for what is being tried.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> before = layer.weight.clone()
        >>> snapshot = Snapshot(layer, [])
        >>> _ = layer.weight.data.zero_()
        >>> snapshot.restore()
        >>> bool((layer.weight == before).all())
        True
    """

    def __init__(self, module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # what was looked at stays alive, or its id might be that of another object
        self._restores: list[Restore] = []
        for submodule in module.modules():
            self._remember_attributes(submodule)
        for parameter in module.parameters():
            self._remember_gradient(parameter)
        for optimizer in optimizers:
            self._remember(optimizer.state)
            self._remember(optimizer.param_groups)

    def restore(self) -> None:
        """Put everything back; may be called again."""
        for restore in self._restores:
            restore()

    def _remember_attributes(self, module: nn.Module) -> None:
        attributes = vars(module)
        saved = {name: value for name, value in attributes.items() if not _is_of_torch(name)}
        for name in ("_parameters", "_buffers", *saved):
            self._remember(attributes[name])
        # The wrapper of FSDP1 makes attributes of its own at its first forward, and needs them from then on.
        is_wrapper = type(module).__module__.startswith("torch.distributed")

        def restore() -> None:
            for name in [name for name in attributes if not _is_of_torch(name) and name not in saved]:
                if not is_wrapper:
                    del attributes[name]
            attributes.update(saved)

        self._restores.append(restore)

    def _remember_gradient(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is not None:
            self._remember(gradient)

        def restore() -> None:
            parameter.grad = gradient

        self._restores.append(restore)

    def _remember(self, value: Any) -> None:
        """Remember the contents of a container or tensor, each once; other values are known by being themselves."""
        if id(value) in self._seen:
            return
        if isinstance(value, (Tensor, list, dict, set)):
            self._seen.add(id(value))
            self._kept.append(value)
        if isinstance(value, Tensor):
            self._restores.append(_restore_tensor(value))
        elif isinstance(value, list):
            self._restores.append(_restore_list(value))
            self._remember_all(value)
        elif isinstance(value, dict):
            self._restores.append(_restore_collection(value))
            self._remember_all(value.values())
        elif isinstance(value, set):
            self._restores.append(_restore_collection(value))
        elif isinstance(value, tuple):
            self._remember_all(value)

    def _remember_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self._remember(value)


def _is_of_torch(attribute: str) -> bool:
    """Whether an attribute holds torch's own registries: hooks that wrappers add late, and names of submodules."""
    return "hook" in attribute or attribute in ("_parameters", "_buffers", "_modules")


def _restore_tensor(tensor: Tensor) -> Restore:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()
    saved = local.detach().to("cpu", copy=True)

    def restore() -> None:
        with torch.no_grad():
            (tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()).copy_(saved)

    return restore


def _restore_list(value: list[Any]) -> Restore:
    items = list(value)

    def restore() -> None:
        value[:] = items

    return restore


def _restore_collection(value: dict[Any, Any] | set[Any]) -> Restore:
    items = value.copy()

    def restore() -> None:
        value.clear()
        value.update(items)

    return restore
