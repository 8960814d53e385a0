"""The entry point of `python -m ssdprof` and of the console script."""

import sys
import warnings


def main() -> None:
    """Run the command line.

    Ctrl-C ends the process without a traceback, even while Python still imports the command line.
    PYTHONWARNINGS=error has no effect: users set it for tests of their own code, and here a warning
    of a library would end the command, or count as a failure of a kernel.
    """
    for rule in [rule for rule in warnings.filters if rule[0] == "error"]:
        warnings.filters.remove(rule)  # type: ignore[attr-defined]
    try:
        from ssdprof.cli import main as command_line

        command_line()
    except KeyboardInterrupt:
        sys.exit(130)  # as `cli.INTERRUPTED`, whose module may not be imported yet


if __name__ == "__main__":
    main()
