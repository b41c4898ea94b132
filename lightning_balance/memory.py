"""Peak memory of this process, in bytes, from the sources that can tell it.

Each reader returns ``None`` where its source does not exist, never 0: "could not look" is not "used nothing".
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

__all__ = ["GIB", "read_accelerator_peak", "read_rss_peak", "restart_accelerator_peak"]

GIB = 2**30


def read_accelerator_peak() -> int | None:
    """Peak bytes of tensors on the current device since the allocator's counter was last restarted.

    Reads a counter on the host and does not wait for the device.

    Example:
        >>> peak = read_accelerator_peak()
        >>> peak is None or peak >= 0
        True
    """
    device = _device_module()
    return int(device.max_memory_allocated()) if device is not None else None


def restart_accelerator_peak() -> None:
    """Make the allocator's peak counter start again from what is allocated now; nothing without an accelerator.

    Example:
        >>> restart_accelerator_peak()
    """
    device = _device_module()
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
    """The torch module (``torch.cuda``, ...) of the accelerator in use, if it was started and has a peak counter."""
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    device = torch.get_device_module(accelerator)
    if not hasattr(device, "max_memory_allocated") or not hasattr(device, "reset_peak_memory_stats"):
        return None
    # Looking must not create a device context, which costs hundreds of MiB on its own.
    if hasattr(device, "is_initialized") and not device.is_initialized():
        return None
    return device
