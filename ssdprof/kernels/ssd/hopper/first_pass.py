# mypy: ignore-errors
"""The first pass of the role `units`: computes the state that a segment adds to a zero state."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ssdprof.kernels.ssd.hopper.lanes import arrive, half_of, lanes_layout, load_transposed
from ssdprof.kernels.ssd.hopper.rings import lane_of, phase, place_in, rows_of, scalar
from ssdprof.kernels.ssd.hopper.weights import weighted

STAGES = {"add_turn": "chunk_state.first_pass", "segment_state": "chunk_state.first_pass"}
WAITS = {"full": "waiting.chunk", "empty": "ahead"}


@gluon.jit
def add_turn(shared, state, x, weight, seen, lane, RELAXED: gl.constexpr):
    """Add to `state` the contribution of the turn after `seen` chunks.  x, weight: of its first chunk, already loaded.

    Returns the state, x and weight of the next turn's first chunk, the decay of all chunks up to the end of this turn,
    and whether there is a next turn.
    """
    operand: gl.constexpr = gl.DotOperandLayout(0, lanes_layout(shared.rows.shape[2]), 2)
    weights: gl.constexpr = gl.SliceLayout(0, operand)
    half = half_of(shared, lane)
    first = shared.first
    slot, gate = place_in(seen, first.RING), place_in(seen, first.weights.shape[0])
    xw = weighted(x, weight, not RELAXED)
    begun = warpgroup_mma(xw, rows_of(shared, slot, half), state, is_async=True)
    if first.TURN == 2:
        mbarrier.wait(first.full.index(slot + 1), phase(seen, first.RING))
        x = load_transposed(shared, slot + 1, lane, operand)
        xw = weighted(x, lane_of(first.weights, gate + 1, lane).load(weights), not RELAXED)
        begun = warpgroup_mma(xw, rows_of(shared, slot + 1, half), begun, is_async=True)
    go = scalar(first.goes_on.index(place_in(seen // first.TURN, first.WORDS))) != 0
    decay = scalar(lane_of(first.decay, gate + first.TURN - 1, lane))
    if first.TURN == 2:
        begun = warpgroup_mma_wait(1, deps=[begun])
        arrive(first.empty.index(slot))
    # load the next turn's first operands during this turn's last product; after the last turn they are unused
    following = place_in(seen + first.TURN, first.RING)
    mbarrier.wait(first.full.index(following), phase(seen + first.TURN, first.RING), pred=go)
    x = load_transposed(shared, following, lane, operand)
    gate = place_in(seen + first.TURN, first.weights.shape[0])
    weight = lane_of(first.weights, gate, lane).load(weights)
    state = warpgroup_mma_wait(0, deps=[begun])
    arrive(first.empty.index(slot + first.TURN - 1))
    return state, x, weight, decay, go


@gluon.jit
def segment_state(shared, state, lane, RELAXED: gl.constexpr):
    """The state that the segment adds to a zero state, its decay, and the number of chunks read.

    Runs from the segment's end backwards.
    """
    operand: gl.constexpr = gl.DotOperandLayout(0, lanes_layout(shared.rows.shape[2]), 2)
    first = shared.first
    mbarrier.wait(first.full.index(0), 0)
    x = load_transposed(shared, 0, lane, operand)
    weight = lane_of(first.weights, 0, lane).load(gl.SliceLayout(0, operand))
    decay = 1.0
    seen = 0
    go = True
    while go:
        state, x, weight, decay, go = add_turn(shared, state, x, weight, seen, lane, RELAXED)
        seen += first.TURN
    return state, decay, seen
