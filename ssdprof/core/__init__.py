"""What all stages share: records, statistics, conditions and words.  Imports no torch; of ssdprof
only `errors`.
"""
