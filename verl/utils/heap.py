"""Host memory between steps: what the C libraries keep of work that is done."""

from __future__ import annotations

import ctypes
import os
import platform

PRODUCTS = "128"
"""Most matrix products that oneDNN keeps compiled, half a megabyte each. Every size of a batch is one, and its own
limit of 1024 lets memory grow for hundreds of steps; making one anew takes a millisecond.
"""


def limit_products() -> None:
    """Call before the first product of the process; later it has no effect. Values in the environment stay."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # its own, and that of torch's layer over it
        os.environ.setdefault(name, PRODUCTS)


def give_back() -> bool:
    """Return free pages of the C heap to the system (glibc); whether there were any. Elsewhere it does nothing."""
    if platform.libc_ver()[0] != "glibc":
        return False
    return bool(ctypes.CDLL(None).malloc_trim(0))
