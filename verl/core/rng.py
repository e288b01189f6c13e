"""Named random streams: every draw is a pure function of (run seed, name, coordinates).

Nothing here has state, so a resumed run needs no random state restored: it asks for the same coordinates.
"""

import hashlib

import numpy as np


def derive_seed(seed: int, name: str, *coords: int | str) -> int:
    """A 63-bit seed for stream `name` at `coords`; the same on every machine and Python version."""
    text = "\x1f".join([str(seed), name, *(str(c) for c in coords)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def stream(seed: int, name: str, *coords: int | str) -> np.random.Generator:
    """A numpy generator positioned at the start of stream `name` at `coords`."""
    return np.random.default_rng(derive_seed(seed, name, *coords))
