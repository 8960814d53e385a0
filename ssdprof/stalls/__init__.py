"""Where warps wait: ncu watches one call, its samples go to lines, lines to stages.

    collect (GPU, ncu) -> .ncu-rep -> read -> attribute -> hints -> schema.stalls.StallReport

Everything after `collect` works on any machine, and gives the same records everywhere.
"""
