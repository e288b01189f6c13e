"""Memory of this process and its device, in GB (10^9 bytes)."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil

GB = 1e9
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def _on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def get_gpu_memory_usage() -> float:
    """GB in use on this process's device, rounded to 0.01.

    On a GPU: what the driver counts as used on the current device (every process, and the allocator's reserve).
    Without one: the resident host memory of this process.
    """
    if _on_gpu():
        import torch

        free, total = torch.cuda.mem_get_info()
        return round((total - free) / GB, 2)
    return round(resident_memory(), 2)


def resident_memory() -> float:
    """GB of host memory that this process holds now."""
    return psutil.Process().memory_info().rss / GB


def reset_peak_memory() -> None:
    """Start a new interval for `peak_memory`. Where the system keeps only one peak a process (macOS), it stays."""
    if _on_gpu():
        import torch

        torch.cuda.reset_peak_memory_stats()
    elif sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> float:
    """Most GB in use since `reset_peak_memory` (else since the start).

    On a GPU: tensors of this process (the allocator's count). Without one: resident host memory of this process.
    """
    if _on_gpu():
        import torch

        return torch.cuda.max_memory_allocated() / GB
    if sys.platform == "linux":
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / GB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / GB


def memory_total(device: str = "auto") -> float:
    """GB that the device has: `cpu`, `cuda`, or `auto` for a GPU if there is one. A container's limit counts."""
    if device == "cuda" or (device == "auto" and _on_gpu()):
        import torch

        return torch.cuda.mem_get_info()[1] / GB
    limits = [psutil.virtual_memory().total]
    for name in _CGROUP_LIMITS:
        file = Path(name)
        if file.is_file() and (text := file.read_text().strip()).isdigit():
            limits.append(int(text))
    return min(limits) / GB
