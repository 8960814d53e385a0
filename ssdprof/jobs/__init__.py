"""The commands' work, one job a file; `compare` is the heart of all of them."""
