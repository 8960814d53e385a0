"""`python -m ssdprof` and the console script."""

import sys


def main() -> None:
    """Ctrl-C while Python still imports ends the process as it does later, without a traceback."""
    try:
        from ssdprof.cli import main as command_line

        command_line()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
