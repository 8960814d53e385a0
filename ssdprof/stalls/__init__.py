"""Warp stalls: ncu samples one call; samples are attributed to source lines, and lines to stages.

    collect (GPU, ncu) -> .ncu-rep -> read -> attribute -> hints -> core.stalls.StallReport

Everything after `collect` works on any machine, with the same result.
"""
