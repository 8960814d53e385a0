"""One file per command: parses options, calls one function, prints."""
