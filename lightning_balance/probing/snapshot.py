"""Put a module and its optimizers back as they were, after micro-batches that must not count."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Restore = Callable[[], None]

HOOK_REGISTRIES = frozenset(name for name in vars(nn.Module()) if "hook" in name)
"""Torch's own attributes for the hooks of a module; wrappers (FSDP) add hooks late and need them from then on."""
OF_TORCH = HOOK_REGISTRIES | {"_parameters", "_buffers", "_modules"}


class Snapshot:
    """What training changes in a module and its optimizers; :meth:`restore` undoes it exactly.

    Kept are parameters, buffers, gradients, the state, options and attributes of the optimizers, and the attributes of
    every submodule: which object each one is, and the contents of tensors, arrays, lists, dictionaries, sets, deques,
    random generators and modules among them (states of torchmetrics, counters, logs of a ``training_step``). Contents
    of other objects are not known and not touched. Copies of tensors are kept in main memory, so that the accelerator's
    memory is free for what is being tried.

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
        # A list of what is still to be looked at, not a recursion: lists of a user may be nested deeply.
        waiting: list[Any] = [*optimizers, module]
        while waiting:
            value = waiting.pop()
            if id(value) not in self._seen:
                waiting += self._remember(value)

    def restore(self) -> None:
        """Put everything back, whatever cannot be put back in between; may be called again.

        Raises:
            RuntimeError: something could not be put back.
        """
        errors = []
        for restore in self._restores:
            try:
                restore()
            except Exception as error:  # noqa: BLE001 - every kind, raised below once the others are back
                errors.append(error)
        if errors:
            raise RuntimeError(
                f"{len(errors)} of the module's values cannot be put back as they were before micro-batches were tried:"
                f" {errors[0]}"
            ) from errors[0]

    @contextmanager
    def undoing_new_hooks(self, module: nn.Module) -> Iterator[None]:
        """Let :meth:`restore` also remove the hooks that are registered on submodules meanwhile."""
        registries = [
            registry
            for submodule in module.modules()
            for name, registry in vars(submodule).items()
            if name in HOOK_REGISTRIES and isinstance(registry, dict)
        ]
        before = [set(registry) for registry in registries]
        try:
            yield
        finally:
            for registry, old in zip(registries, before, strict=True):
                for key in registry.keys() - old:
                    self._restores.append(lambda registry=registry, key=key: registry.pop(key, None))  # type: ignore[misc]

    def _remember(self, value: Any) -> Iterable[Any]:
        """Remember the contents of a value, and return what they hold; others are known by being themselves."""
        if isinstance(value, tuple):
            return value
        restore, held = _restore_of(value)
        if restore is None:
            return ()
        self._seen.add(id(value))
        self._kept.append(value)
        self._restores.append(restore)
        return held


def _restore_of(value: Any) -> tuple[Restore | None, Iterable[Any]]:
    """What puts a value's contents back, None where they are not known, and the values that it holds."""
    if isinstance(value, nn.Module):
        return _restore_module(value)
    if isinstance(value, Optimizer):
        return _restore_attributes(value, keeps_new=False)
    if isinstance(value, nn.Parameter):
        return _restore_parameter(value)
    if isinstance(value, Tensor):
        return _restore_tensor(value), ()
    if isinstance(value, (list, deque)):
        return _restore_collection(value, value.extend), list(value)
    if isinstance(value, dict):
        return _restore_collection(value, value.update), list(value.values())
    if isinstance(value, set):
        return _restore_collection(value, value.update), ()
    if type(value) is np.ndarray and value.flags.writeable:  # no file that is mapped into memory
        return _restore_array(value), ()
    return _restore_generator(value), ()


def _restore_module(module: nn.Module) -> tuple[Restore, list[Any]]:
    # The wrapper of FSDP1 makes attributes of its own at its first forward, and needs them from then on.
    is_wrapper = type(module).__module__.startswith("torch.distributed")
    restore, held = _restore_attributes(module, keeps_new=is_wrapper)
    return restore, [*held, module._parameters, module._buffers, module._modules]


def _restore_attributes(owner: Any, *, keeps_new: bool) -> tuple[Restore, list[Any]]:
    attributes = vars(owner)
    saved = {name: value for name, value in attributes.items() if name not in OF_TORCH}

    def restore() -> None:
        for name in [name for name in attributes if name not in OF_TORCH and name not in saved]:
            if not keeps_new:
                del attributes[name]
        attributes.update(saved)

    return restore, list(saved.values())


def _restore_parameter(parameter: nn.Parameter) -> tuple[Restore, list[Any]]:
    gradient, requires_grad = parameter.grad, parameter.requires_grad
    restore_values = _restore_tensor(parameter)

    def restore() -> None:
        restore_values()
        if parameter.requires_grad != requires_grad:
            parameter.requires_grad_(requires_grad)
        parameter.grad = gradient

    return restore, [] if gradient is None else [gradient]


def _restore_tensor(tensor: Tensor) -> Restore:
    shape = _local(tensor).shape
    distinct = _distinct(_local(tensor))
    # Not to("cpu", copy=True), which copies no values of compressed sparse tensors.
    saved = distinct.clone() if distinct.device.type == "cpu" else distinct.to("cpu")

    def restore() -> None:
        if tensor.layout is not torch.strided:
            with torch.no_grad():
                tensor.copy_(saved)  # itself: what is detached from a sparse tensor takes values of its own
            return
        if _local(tensor).shape != shape:
            tensor.data = saved.to(tensor.device, copy=True).expand(shape)  # it was resized in place
            return
        with torch.no_grad():
            _distinct(_local(tensor)).copy_(saved)

    return restore


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


def _distinct(tensor: Tensor) -> Tensor:
    """The elements that are not copies of each other by ``expand``, which nothing can be written to."""
    if tensor.layout is torch.strided and not tensor.is_nested:
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if size > 1 and stride == 0:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _restore_collection(value: Any, refill: Callable[[Any], None]) -> Restore:
    items = value.copy()

    def restore() -> None:
        value.clear()
        refill(items)

    return restore


def _restore_array(array: np.ndarray[Any, Any]) -> Restore:
    saved = array.copy()

    def restore() -> None:
        array[...] = saved

    return restore


def _restore_generator(value: Any) -> Restore | None:
    """What sets a source of random numbers back; None for anything else."""
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state)  # type: ignore[return-value]  # what it returns is not used
    if isinstance(value, np.random.Generator):
        of_bits = copy.deepcopy(value.bit_generator.state)
        return lambda: setattr(value.bit_generator, "state", of_bits)
    if isinstance(value, np.random.RandomState):
        of_numpy = value.get_state()
        return lambda: value.set_state(of_numpy)
    if isinstance(value, random.Random):
        of_python = value.getstate()
        return lambda: value.setstate(of_python)
    return None
