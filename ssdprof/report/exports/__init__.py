"""A run's report in the formats that other programs read.  Each module renders one; none of them writes a file."""
