"""Stages and stall reasons in plain words."""

from __future__ import annotations

PARTS = {
    "waiting.chunk": "for a chunk and its gates",
    "waiting.scores": "for the scores",
    "waiting.half": "for the other half of N",
    "waiting.gates": "for the gates' word",
    "chunk_state.first_pass": "first pass",
    "state_passing.wait": "waiting for the segment before",
    "state_passing.load": "loading the state",
    "state_passing.store": "storing the state",
    "chunk_scan.previous": "previous state",
    "chunk_scan.current": "current chunk",
    "chunk_scan.residual": "residual and store",
    "ahead": "roles that are ahead",
}
REASONS = {
    "selected": "issuing: not a stall",
    "not_selected": "ready, another warp was taken: not a stall",
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
    "drain": "has ended, its stores have not",
    "misc": "something else",
}


def part(stage: str) -> str:
    """What comes after a stage's dot, in words."""
    return PARTS.get(stage, stage.split(".", 1)[-1].replace("_", " "))
