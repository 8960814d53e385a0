"""Two runs or two benches, case by case: read, pair, judge.

compare(BASE, NEW) -> schema.comparison.Comparison
"""
