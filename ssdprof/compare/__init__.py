"""Two runs, benches or records of prefill times, case by case: read, pair, judge.

compare(BASE, NEW) -> schema.comparison.Comparison
"""
