"""Descriptions of stall reasons."""

from __future__ import annotations

REASONS = {
    "selected": "issuing: not a stall",
    "not_selected": "ready, but another warp was chosen: not a stall",
    "long_scoreboard": "waits for memory beyond the SM (L2, DRAM), or at an mbarrier",
    "short_scoreboard": "waits for shared memory, a shuffle or a special function (exp2)",
    "barrier": "waits for other warps at a barrier, or for the tensor cores to finish",
    "wait": "waits out the fixed latency of the instruction before",
    "math_pipe_throttle": "its compute pipe is full",
    "mio_throttle": "the queue to shared memory and special functions is full",
    "lg_throttle": "the queue to global memory is full",
    "tex_throttle": "the queue to the texture unit is full",
    "no_instructions": "its instructions are not in the cache yet",
    "branch_resolving": "waits for a jump's target",
    "dispatch_stall": "the dispatcher held the instruction back",
    "warpgroup_arrive": "waits for registers to be handed to the tensor cores",
    "membar": "waits at a memory fence",
    "sleeping": "sleeps before it looks again",
    "imc_miss": "a constant is not in the cache",
    "drain": "has ended, but its stores have not",
    "misc": "something else",
}
