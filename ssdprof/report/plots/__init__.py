"""Pictures of a report, as SVG: the same bytes for the same report.  Every number in them is in the tables too."""
