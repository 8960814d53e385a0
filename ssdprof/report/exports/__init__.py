"""A run's report in the formats that other programs read.  Each module renders one format, and writes no file."""
