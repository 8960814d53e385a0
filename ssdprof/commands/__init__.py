"""One file per verb: parse, call one function, print."""
