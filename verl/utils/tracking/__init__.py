"""Where metrics go. One file a sink, each the only one that imports its library."""

from verl.utils.tracking.base import Sink, Start
from verl.utils.tracking.jsonl import read_metrics
from verl.utils.tracking.tracker import SINKS, Tracker

__all__ = ["SINKS", "Sink", "Start", "Tracker", "read_metrics"]
