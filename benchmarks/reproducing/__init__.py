"""What reproduce.py is made of: published documents, measurements, values, verdicts, pages."""
