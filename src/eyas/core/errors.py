"""Errors that a user can act on; each names the file, field or flag and what to do about it.

    EyasError (a ValueError)
      ConfigError        a recipe, flag or parameter
      ModelFormatError   a model or head on disk: missing shard, wrong shape, unsupported family, a pickle
      HeadMismatchError  a head that was made for another target
      DataError          a prompts file, shard, chat template or loss mask
      RequestError       one request; its neighbours go on

Internal invariants are asserted, never raised as one of these.
"""


class EyasError(ValueError):
    """Base of every error that a user's input can cause."""


class ConfigError(EyasError):
    """A recipe, flag or parameter is unknown or out of range."""


class ModelFormatError(EyasError):
    """A model or head on disk cannot be read as what it should be."""


class HeadMismatchError(EyasError):
    """A draft head was made for another target; the message shows the two values side by side."""


class DataError(EyasError):
    """Training data, a chat template or a loss mask is unusable."""


class RequestError(EyasError):
    """One request cannot be served; others are not affected."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory was short: Python's, or one of torch's, which have no common type.

    >>> out_of_memory(MemoryError()), out_of_memory(RuntimeError("shapes differ"))
    (True, False)
    """
    words = ("out of memory", "can't allocate memory", "Storage size calculation overflowed")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)
