"""Warp stalls: ncu samples one call; samples are attributed to source lines, and lines to stages.

    ncu (GPU) -> .ncu-rep -> read -> attribute -> facts -> core.stalls.StallReport

Everything after `ncu` works on any machine, with the same result.
"""
