"""The parts of reproduce.py: published documents, measurements, values, verdicts, pages."""
