"""A kernel with warp roles that never ran, small enough to add up its samples by hand."""

from ssdprof.stalls.read import MetricValue, Point, RawKernel, RawReport

FILE = "/somewhere/kernel.py"
LIBRARY = "/x/triton/language/standard.py"
SOURCE = """\
STAGES = {"load": "loads", "scan": "chunk_scan.current", "_kernel": "setup", "twice": "caller"}
WAITS = {"empty": "ahead"}
@jit
def load(p):
    mbarrier.wait(shared.empty, 0)
    return p
@jit
def scan(x):
    return exp2(x)
@jit
def twice(x):
    return x + x
@jit
def _kernel(
    x_ptr,
):
    gl.warp_specialize([(load, ()), (scan, ())])
"""
METRICS: dict[str, MetricValue] = {
    "gpu__time_duration.sum": 2000.0, "smsp__pcsamp_sample_count": 200,
    "smsp__pcsamp_dropped_bytes": 0, "launch__registers_per_thread": 128, "launch__grid_dim_x": 40,
    "launch__occupancy_limit_registers": 1.0, "launch__occupancy_limit_shared_mem": 1.0,
    "launch__occupancy_limit_warps": 4.0, "sm__warps_active.avg.pct_of_peak_sustained_active": 25.0,
    "lts__t_sector_hit_rate.pct": 92.0, "smsp__issue_active.avg.pct_of_peak_sustained_active": 40.0,
    "device__attribute_display_name": "NVIDIA H200",
}  # fmt: skip
POINTS = (
    Point(0x100, FILE, 14, "S2R R1, SR_TID.X", {"wait": 2}),  # the header, made by the compiler
    Point(0x110, FILE, 14, "BAR.SYNC 0x1", {"barrier": 50}),
    Point(0x120, FILE, 5, "SYNCS.PHASECHK", {"long_scoreboard": 20}),
    Point(0x130, FILE, 6, "LDG", {"long_scoreboard": 38}),
    Point(0x140, FILE, 12, "FADD", {"wait": 10}),  # a helper, inlined into load
    Point(0x150, FILE, 9, "MUFU.EX2", {"short_scoreboard": 60, "selected": 8}),
    Point(0x160, LIBRARY, 293, "SHFL", {"short_scoreboard": 12}),  # a library, inlined into scan
    Point(0x170, FILE, 9, "NOP", {}),
)


def kernel(**changes: object) -> RawKernel:
    points = changes.get("points", POINTS)
    totals = {}
    for point in points:  # type: ignore[attr-defined]
        for reason, count in point.samples.items():
            totals[reason] = totals.get(reason, 0) + count
    fields = {
        "function": "_kernel",
        "metrics": METRICS,
        "totals": totals,
        "points": points,
        "sources": {FILE: SOURCE, LIBRARY: "nothing\n"},
    }
    return RawKernel(**(fields | changes))  # type: ignore[arg-type]


def report(*kernels: RawKernel, name: str = "a.ncu-rep", whole: bool | None = True) -> RawReport:
    return RawReport(name=name, sha256="0" * 64, kernels=kernels, whole=whole)
