"""Errors that a user can act on. Each message is one line: what is wrong, where, and what to do."""


class VerlError(ValueError):
    """Base of every error caused by input; the command line prints it as one line and exits with 2."""


class ConfigError(VerlError):
    """A flag, key or value of the configuration is wrong. The message starts with its path."""


class DataError(VerlError):
    """A data set is missing, empty or not in a known schema."""


class ModelError(VerlError):
    """A model path cannot be loaded, or holds a model that this role cannot use."""


class RewardError(VerlError):
    """A reward source returned something that is not one finite number per response."""


class RolloutError(VerlError):
    """A generation request cannot be served as asked."""


class WeightsError(VerlError):
    """Weights cannot move from the layout that trains to the layout that generates."""


class CheckpointError(VerlError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class MissingDependency(VerlError):
    """An optional package is needed; the message holds the install command."""


class WorkerError(VerlError):
    """A worker raised, died, or did not answer in time. The message is one line with role, rank and method.

    traceback: of the worker where it raised, else "".
    """

    def __init__(self, what: str, *, role: str, rank: int, method: str, traceback: str = ""):
        super().__init__(f"{role}, rank {rank}, {method}: {what}")
        self.role, self.rank, self.method, self.traceback = role, rank, method, traceback
