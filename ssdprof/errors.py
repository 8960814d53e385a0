"""What the user sees when something goes wrong: one sentence, one hint, one exit code."""

from enum import IntEnum


class ExitCode(IntEnum):
    """The documented exit codes of every command."""

    OK = 0
    GATE_FAILED = 1  # a comparison or a limit that the user asked for did not hold
    BAD_INPUT = 2  # wrong usage, unknown layer, corrupt capture, unsupported model
    MISSING_CAPABILITY = 3  # this machine lacks a GPU, memory, ncu or a permission
    MODEL_UNAVAILABLE = 4  # not found, gated, offline, truncated


class SsdprofError(Exception):
    """An error that the command line prints as two lines instead of a traceback.

    `message` is one sentence that says what is wrong; `hint` says what to do about it.
    """

    exit_code: ExitCode = ExitCode.BAD_INPUT

    def __init__(self, message: str, hint: str = "", exit_code: ExitCode | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if exit_code is not None:
            self.exit_code = exit_code


class BadInputError(SsdprofError):
    """The user asked for something that does not exist or cannot be read."""

    exit_code = ExitCode.BAD_INPUT


class MissingCapabilityError(SsdprofError):
    """This machine lacks something that the command needs."""

    exit_code = ExitCode.MISSING_CAPABILITY


class ModelUnavailableError(SsdprofError):
    """The checkpoint cannot be had."""

    exit_code = ExitCode.MODEL_UNAVAILABLE
