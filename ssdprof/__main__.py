"""`python -m ssdprof` and the console script."""

from ssdprof.cli import main

if __name__ == "__main__":
    main()
