"""`python -m ssdprof` and the console script."""

import sys
import warnings


def main() -> None:
    """Ctrl-C while Python still imports ends the process as it does later, without a traceback.

    PYTHONWARNINGS=error is for tests of one's own code: a warning of a library would end the
    command, or count as a failure of a kernel.
    """
    for rule in [rule for rule in warnings.filters if rule[0] == "error"]:
        warnings.filters.remove(rule)  # type: ignore[attr-defined]
    try:
        from ssdprof.cli import main as command_line

        command_line()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
