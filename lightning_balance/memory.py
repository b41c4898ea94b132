"""Peak memory of this process, in bytes, from the sources that can tell it.

Each reader returns ``None`` where its source does not exist, never 0: "could not look" is not "used nothing".
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

__all__ = ["GIB", "has_accelerator_peak", "read_accelerator_peak", "read_rss_peak", "restart_accelerator_peak"]

GIB = 2**30


def has_accelerator_peak() -> bool:
    """Whether this machine has an accelerator whose allocator counts its peak, in use or not.

    Example:
        >>> has_accelerator_peak() or read_accelerator_peak() is None
        True
    """
    return _device_module() is not None


def read_accelerator_peak() -> int | None:
    """Peak bytes of tensors on the current device since the allocator's counter was last restarted.

    Reads a counter on the host and does not wait for the device. ``None`` as well while this process has not used the
    device yet.

    Example:
        >>> peak = read_accelerator_peak()
        >>> peak is None or peak >= 0
        True
    """
    device = _started_device_module()
    return int(device.max_memory_allocated()) if device is not None else None


def restart_accelerator_peak() -> None:
    """Make the allocator's peak counter start again from what is allocated now; nothing without an accelerator.

    Example:
        >>> restart_accelerator_peak()
    """
    device = _started_device_module()
    if device is not None:
        device.reset_peak_memory_stats()


def read_rss_peak() -> int | None:
    """Peak resident bytes of this process since it started, ``None`` on systems that do not tell (Windows).

    Example:
        >>> peak = read_rss_peak()
        >>> peak is None or peak > 2**20
        True
    """
    # ru_maxrss of a child starts at its parent's size on Linux (it survives fork and exec), VmHWM does not.
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _device_module() -> Any:
    """The torch module (``torch.cuda``, ...) of this machine's accelerator, ``None`` if it has no peak counter."""
    if not torch.accelerator.is_available():
        return None
    device = torch.get_device_module(torch.accelerator.current_accelerator())
    has_counter = hasattr(device, "max_memory_allocated") and hasattr(device, "reset_peak_memory_stats")
    return device if has_counter else None


def _started_device_module() -> Any:
    """The same, ``None`` if this process does not use the accelerator yet: looking must not create a context on it."""
    device = _device_module()
    return device if device is not None and getattr(device, "is_initialized", lambda: True)() else None
