"""Every error that samestep raises, as one tree.

SamestepError
├── ConfigError            a setting of the user's: exit code 2, one message, no traceback
│   └── CheckpointError    a checkpoint that is not whole, or does not fit this run
├── CallbackError          a callback raised an error, blocked, or changed what it may only read
├── DataError              the data set, a sample or the collation failed
├── LossError              the loss returned something that has no global meaning
├── NotReproducible        an operation whose bits move, met in exact mode
├── NonFinite              the gradient of a step holds an infinity or a NaN
├── ClusterError           the world outside this process
│   ├── PeerLost           another rank is gone
│   ├── TimedOut           another rank did not answer within the limit
│   └── Disagreement       ranks hold what must be equal and is not
└── InternalError          a mistake of ours

Each message says what, where, with which values, and what to do.
"""

from __future__ import annotations


class SamestepError(Exception):
    """The root of all errors that samestep raises on purpose."""


class ConfigError(SamestepError):
    """A setting is wrong; the message names it, its value and the remedy."""


class CheckpointError(ConfigError):
    """A checkpoint is missing, damaged, of another run, or cannot be written where it should lie."""


class CallbackError(SamestepError):
    """A callback raised an error, blocked, or changed what it may only read; the message names it."""


class DataError(SamestepError):
    """A data set, a sample or the collation of a micro-batch failed."""


class LossError(SamestepError):
    """A loss returned something that cannot be summed over a global batch."""


class NotReproducible(SamestepError):
    """An operation whose bits move from run to run was met in exact mode."""


class NonFinite(SamestepError):
    """The gradient of a step holds an infinity or a NaN, and no rule says to skip it."""


class ClusterError(SamestepError):
    """Something outside this process went wrong."""


class PeerLost(ClusterError):
    """Another rank is gone. The cause is that rank's own error, not this one."""


class TimedOut(ClusterError):
    """Another rank did not answer within the limit."""


class Disagreement(ClusterError):
    """Ranks hold different values of something that must be equal on all."""


class InternalError(SamestepError):
    """An invariant of samestep is broken: please report it."""
