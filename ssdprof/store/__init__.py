"""Reports on the disk: a folder each, with one file for each process that writes into it."""
