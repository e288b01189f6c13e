"""Waits that end: with the work done, or with an error that says who waited for whom."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from verl.core.errors import WeightsError

_POLL_SECONDS = 0.0005


class Deadline:
    """A point in time that several waits share. seconds: from now; on_device: the work runs on an accelerator."""

    def __init__(self, seconds: float, on_device: bool = False):
        self.seconds, self.on_device = seconds, on_device
        self._end = time.monotonic() + seconds

    def wait(self, work: dist.Work, what: str) -> None:
        """Until `work` is done. what: rank, peer and bytes, for the WeightsError where it fails or takes too long."""
        try:
            if self.on_device:
                # A wait for such work only orders the stream and returns at once; its completion has to be asked for.
                while not work.is_completed():
                    if time.monotonic() > self._end:
                        raise WeightsError(f"{what}: not done after {self.seconds:g} s; is a rank late, or gone?")
                    time.sleep(_POLL_SECONDS)
                work.wait()
            else:
                work.wait(timedelta(seconds=max(self._end - time.monotonic(), 0.001)))  # 0 would be no limit
        except RuntimeError as e:
            reason = str(e).splitlines()[0] if str(e) else type(e).__name__
            raise WeightsError(f"{what}: not done within {self.seconds:g} s, or a rank is gone ({reason})") from e
