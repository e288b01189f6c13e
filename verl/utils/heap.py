"""Host memory of a process that trains on a CPU: what the C libraries keep, and in pages of which size."""

from __future__ import annotations

import ctypes
import os
import platform

PRODUCTS = "128"
"""Most matrix products that oneDNN keeps compiled, half a megabyte each. Every size of a batch is one, and its own
limit of 1024 lets memory grow for hundreds of steps; making one anew takes a millisecond.
"""
_SETTINGS = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": PRODUCTS,
    "LRU_CACHE_CAPACITY": PRODUCTS,  # of torch's layer over oneDNN's cache
    "THP_MEM_ALLOC_ENABLE": "1",  # torch asks for pages of 2 MiB where a tensor is that large
}
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # as malloc.h names them
_ALLOCATOR = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


def settle() -> None:
    """Set up a process whose tensors come and go by the gigabyte; call before its first product and large tensor.

    A page that is new costs more than what is computed with it: half of an update's time went there. So freed memory
    stays with the process (`give_back` returns it), and tensors lie in large pages. Values in the environment stay.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    if _glibc() and not any(name in os.environ for name in _ALLOCATOR):
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, -1)


def give_back() -> bool:
    """Return free pages of the C heap to the system (glibc); whether there were any. Elsewhere it does nothing."""
    return _glibc() and bool(ctypes.CDLL(None).malloc_trim(0))


def _glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"
