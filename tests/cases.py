"""Cases and reports made by hand.  No number in them was measured.

report()                        a whole run on a GPU: four layers, one prompt, `unfused` and
                                `fused`, exact and relaxed
report(gpu=False)               accuracy only, from Triton's interpreter
report(change=lambda case: ...) every case changed
bench(), prefill(), answers()   reports of the other kinds
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, TypeVar

from ssdprof.core.accuracy import Accuracy, BudgetUse, Deviation
from ssdprof.core.base import (
    EXACT_FP32,
    SMALLEST_DIFFERENCE,
    VERSION,
    DType,
    PrecisionName,
    Record,
    exact_precision,
    intermediates_of,
    states_of,
)
from ssdprof.core.case import (
    AnswerBand,
    Answers,
    Case,
    DecodedStates,
    Generated,
    Launch,
    LayerCall,
    Prefill,
    Samples,
)
from ssdprof.core.conditions import Condition, parse_gate
from ssdprof.core.report import ProcessLine, Report
from ssdprof.core.statistics import Estimate
from ssdprof.core.target import (
    CallRef,
    Ceilings,
    CheckpointRef,
    Clocks,
    Dims,
    Environment,
    Gpu,
    LayerRef,
    Prompt,
    Serving,
)

EXACT_FP16 = "exact, fp16 states"
RELAXED_FP32 = "relaxed, fp32 states"
RELAXED_FP16 = "relaxed, fp16 states"
PRECISIONS = (EXACT_FP32, EXACT_FP16, RELAXED_FP32, RELAXED_FP16)
SIZES = {"nheads": 128, "headdim": 64, "ngroups": 1, "dstate": 128}
FASTER = {"exact": 2.0, "relaxed": 2.5}  # than the baseline, by device time
CALL_US = 20.0  # more than the device time
_T = 4.303 / math.sqrt(3)  # of three recordings
_PATTERN = (1.0, -1.0, 0.0)
Kind = TypeVar("Kind", LayerCall, Generated, DecodedStates, Answers, Prefill)


def made_of(record: type[Any], fields: dict[str, Any], /, **defaults):
    return record(**(defaults | fields))


def samples(
    clock: str, us: float, width: float = 0.005, process: str = "p", turn: int = 0
) -> Samples:
    """Three recordings whose 95 % interval is about us x (1 +- width).  turn: rotates them: their
    ratio to others that are not rotated has an interval too.
    """
    steps = (us * math.exp(width / _T * _PATTERN[(number + turn) % 3]) for number in range(3))
    return Samples.model_validate(
        {"process": process, "clock": clock, "us": tuple((one,) * 3 for one in steps)}
    )


def timed(
    device_us: float | None, call_us: float | None = None, width: float = 0.005, turn: int = 0
) -> tuple[Samples, ...]:
    """Samples of both clocks, or of one."""
    clocks = {"device": device_us, "call": call_us}
    return tuple(
        samples(clock, us, width, turn=turn) for clock, us in clocks.items() if us is not None
    )


def slowed(factor: float, where: Callable[[Case], bool] = lambda _: True) -> Callable[[Case], Case]:
    """Multiplies the times of the selected cases."""

    def change(case: Case) -> Case:
        us = [
            tuple(tuple(factor * us for us in rounds) for rounds in one.us) for one in case.samples
        ]
        longer = (one.changed(us=of_one) for one, of_one in zip(case.samples, us, strict=True))
        return case.changed(samples=tuple(longer)) if where(case) else case

    return change


def layer(index: int = 0, operator: str = "ssd") -> LayerRef:
    return LayerRef(index=index, name=f"model.layers.{index}.mamba", operator=operator)


def dims(
    seqlen: int = 1024, batch: int = 1, dtype: DType = "bf16", chunk_size: int | None = 256
) -> Dims:
    words = "128 heads x 64, state 128"
    return Dims(
        operator="ssd",
        sizes=SIZES,
        words=words,
        batch=batch,
        seqlen=seqlen,
        chunk_size=chunk_size,
        dtype=dtype,
    )


def deviation(
    rms: float = 2e-3, matches: Sequence[float] = (70.0, 99.0, 100.0), **fields
) -> Deviation:
    """matches: percent at each of `TOLERANCES`."""
    place = {"worst_head": 7, "worst_position": (0, 5, 7, 3)} | fields
    return made_of(
        Deviation,
        place,
        against="fp64 oracle",
        elements=1000,
        matches=tuple(matches),
        rms_ratio=rms,
        max_abs=10 * rms,
        nonfinite=0,
        scale_max_abs=4.0,
        along=(rms, 2 * rms),
    )


def accuracy(
    tensor: str = "out", used: float = 0.5, against: str = "unfused exact, fp32 states", **fields
) -> Accuracy:
    """used: share of the error budget.  against: empty for the baseline itself."""
    use = BudgetUse(norm="max", head=7, error=used, budget=1.0, position=(0, 5, 7, 3))
    return made_of(
        Accuracy,
        fields,
        tensor=tensor,
        dtype="bf16" if tensor == "out" else "fp32",
        vs_oracle=deviation(),
        vs_baseline=deviation(1e-3, (90.0, 99.9, 100.0), against=against) if against else None,
        floor=deviation(1.5e-3, (75.0, 99.5, 100.0)),
        budget=(use, use.changed(norm="rms", error=used / 2)),
    )


@cache
def both_tensors(against: str) -> tuple[Accuracy, ...]:
    states = {"worst_head": 7, "worst_position": (0, 7, 3, 5), "along": ()}
    of_states = accuracy("final_states", against=against)
    errors = {
        name: error.changed(**states)
        for name in ("vs_oracle", "vs_baseline", "floor")
        if (error := getattr(of_states, name)) is not None
    }
    return accuracy("out", against=against), of_states.changed(**errors)


def case(implementation: str = "fused", precision: PrecisionName = EXACT_FP32, **fields) -> Case:
    """A case of a captured call of layer 0 at 1,024 tokens; without times unless `samples` are
    given.

    fields: of the case, or of its `LayerCall`.
    """
    usual = {
        "implementation": implementation,
        "precision": precision,
        "status": "ran",
        "baseline": "" if implementation == "unfused" else "unfused",
        "variant": {"fused": "hopper"}.get(implementation, implementation),
    }
    size = {"batch": fields.get("batch", 1), "seqlen": fields.get("seqlen", 1024)}
    of_call = {name: fields.pop(name) for name in ("layer", "call", "dims") if name in fields}
    if "task" not in fields:
        usual["task"] = made_of(LayerCall, of_call, kind="layer", layer=layer(), dims=dims(**size))
    if isinstance(fields.get("task", usual.get("task")), LayerCall | Generated):
        is_judged = usual["baseline"] or intermediates_of(precision) == "relaxed"
        usual["accuracy"] = both_tensors(
            f"unfused exact, {states_of(precision)} states" if is_judged else ""
        )
    return Case(**(usual | size | fields))


def with_task(case: Case, **fields) -> Case:
    """The case with other fields of its task."""
    return case.changed(task=case.task.changed(**fields))


def task_of(case: Case, kind: type[Kind]) -> Kind:
    """The case's task, which is of this kind."""
    assert isinstance(case.task, kind)
    return case.task


def failed(case: Case, result: str = "inaccurate") -> Case:
    """The case with another result, and without times."""
    if result == "inaccurate":
        return case.changed(
            samples=(), accuracy=tuple(accuracy(each.tensor, 1.5) for each in case.accuracy)
        )
    if result == "nonfinite":
        bad = deviation(nonfinite=3, first_nonfinite=(0, 1, 2, 3), rms_ratio=None)
        return case.changed(
            samples=(), accuracy=(accuracy("out").changed(vs_oracle=bad), *case.accuracy[1:])
        )
    reason = {
        "refused": "headdim 80 is not supported",
        "out of memory": "CUDA out of memory",
        "failed": "it broke",
    }
    return case.changed(
        status=result,
        reason=reason[result],
        samples=(),
        accuracy=(),
        launches=(),
        workspace_bytes=None,
    )


@cache
def of_size(size: float, against: str) -> tuple[Accuracy, ...]:
    """Accuracies with errors `size` times as large as others, and fewer matches."""

    def scaled(one: Deviation) -> Deviation:
        rms = (one.rms_ratio or 0.0) * size
        along = tuple(size * (slice_ or 0.0) for slice_ in one.along)
        zero, small, large = one.matches
        return one.changed(
            rms_ratio=rms, max_abs=10 * rms, matches=(zero / size, small / size, large), along=along
        )

    return tuple(
        one.changed(
            vs_oracle=scaled(one.vs_oracle), vs_baseline=one.vs_baseline and scaled(one.vs_baseline)
        )
        for one in both_tensors(against)
    )


def launches(name: str, *, gpu: bool = True) -> tuple[Launch, ...]:
    """Two kernels of `unfused`, one of `fused`; the interpreter has no registers."""
    known = {"registers": 168, "spills": 0, "shared_bytes": 98_304} if gpu else {}
    kernels = ("_state_kernel", "_output_kernel") if name == "unfused" else (f"_{name}_kernel",)
    return tuple(
        Launch(kernel=kernel, config={"chunk": 64, "num_warps": 4}, **known) for kernel in kernels
    )


def calls(
    index: int = 0,
    seqlen: int = 131_072,
    precisions: Sequence[PrecisionName] = PRECISIONS,
    *,
    gpu: bool = True,
) -> tuple[Case, ...]:
    """`unfused` and `fused` in one layer.  `unfused` takes 1,000 us, and more in later layers.
    Errors are larger in later layers, and with relaxed intermediates.
    """
    cases = []
    base_us = 1000.0 + 10 * index
    for name in ("unfused", "fused"):
        for precision in precisions:
            unfused_us = base_us * 0.9 if intermediates_of(precision) == "relaxed" else base_us
            us = unfused_us if name == "unfused" else base_us / FASTER[intermediates_of(precision)]
            first = name == "unfused" and intermediates_of(precision) == "exact"
            size = (1 + index / 100) * (1.5 if intermediates_of(precision) == "relaxed" else 1)
            cases.append(
                case(
                    name,
                    precision,
                    layer=layer(index),
                    seqlen=seqlen,
                    baseline="" if first else "unfused",
                    accuracy=of_size(
                        size, "" if first else f"unfused {exact_precision(precision)}"
                    ),
                    variant=("hopper" if name == "fused" else "portable") if gpu else "interpreter",
                    samples=timed(us, us + CALL_US, turn=name == "unfused") if gpu else (),
                    bytes_moved=10**9,
                    flops=10**11,
                    workspace_bytes=(1 if name == "fused" else 2) << 20,
                    launches=launches(name, gpu=gpu),
                )
            )
    return tuple(cases)


def report(
    *,
    layers: Sequence[int] = (0, 9, 18, 27),
    seqlens: Sequence[int] = (131_072,),
    precisions: Sequence[PrecisionName] = PRECISIONS,
    gpu: bool = True,
    change: Callable[[Case], Case] = lambda one: one,
    **fields,
) -> Report:
    """A run.  change: of every case.  fields: of the report, or of its process."""
    cases = tuple(
        case for n in seqlens for i in layers for case in calls(i, n, precisions, gpu=gpu)
    )
    return of_cases(
        "run",
        [change(one) for one in cases],
        **{
            "requested": tuple(requested(one) for one in cases),
            "prompts": tuple(prompt(seqlen) for seqlen in seqlens),
            "captured": tuple(layer(index) for index in layers),
            "environment": environment(gpu=gpu),
            "segment_length": 8192,
            **({"peak_bytes": 30 << 30} if gpu else {"clocks": None, "ceilings": None}),
            **fields,
        },
    )


def two_layers(**fields) -> Report:
    """A run of two layers at two precisions."""
    usual = {"layers": (0, 9), "precisions": (EXACT_FP32, RELAXED_FP32)}
    return report(**usual | fields)


def taken(fields: dict[str, Any], model: type[Record], *, but: str) -> dict[str, Any]:
    """Removes the fields of a model from the others."""
    return {name: fields.pop(name) for name in fields.keys() & model.model_fields.keys() - {but}}


def of_cases(kind: str, made: Iterable[Case] = (), **fields) -> Report:
    """A complete report of one process.  fields: of the report, or of its process
    (`ProcessLine`).
    """
    of_process = taken(fields, ProcessLine, but="notes")
    process = {
        "process": "p",
        "complete": True,
        "clocks": clocks(),
        "ceilings": Ceilings(copy_gb_per_s=4312.0, matmul_tflops=781.0),
    }
    ref = None if kind == "bench" else checkpoint()
    return made_of(
        Report,
        fields,
        version=VERSION,
        kind=kind,
        id=f"20260102-030405-{kind}",
        created="2026-01-02T03:04:05Z",
        command=("ssdprof", kind),
        ssdprof_version="0.1.0",
        target=ref.repo_id if ref else "ssd",
        model=ref,
        environment=environment(),
        baseline="unfused",
        matched_with="unfused",
        smallest_difference=SMALLEST_DIFFERENCE,
        cases=tuple(made),
        processes=(ProcessLine(**(process | of_process)),),
    )


def requested(case: Case) -> tuple[str, str, str]:
    return case.case_key, case.implementation, str(case.precision)


def in_calls(run: Report, count: int = 3) -> Report:
    """A run as a chunked prefill: each case becomes one for each of `count` chunks of its
    prompt.
    """
    chunks = []
    for one in run.cases:
        length = one.seqlen // count
        for number in range(1, count + 1):
            call = CallRef(
                kind="chunk", number=number, count=count, prompt_seqlen=one.seqlen, sequences=1
            )
            chunks.append(with_task(one, call=call, dims=dims(length)).changed(seqlen=length))
    served = tuple(one.changed(serving=Serving(chunk=one.seqlen // count)) for one in run.prompts)
    return run.changed(cases=tuple(chunks), prompts=served, requested=tuple(map(requested, chunks)))


def rows(table: str) -> list[list[str]]:
    """The cells of a table in a test, a row a line, with arrows between the cells."""
    return [line.split(" => ") for line in table.splitlines()]


# --- other kinds


def generated(tokens: str = "1 x 1,024", **fields) -> Generated:
    return made_of(
        Generated,
        fields,
        kind="generated",
        tokens=tokens,
        dims=dims(),
        shape="mamba2-2.7b",
        shape_words="80x64, N 128, G 1",
        sequences=1,
    )


def cell(seqlen: int = 1024, times: dict[str, float] | None = None, **fields) -> tuple[Case, ...]:
    """A bench's cases on the same inputs.  times: device time of each implementation."""
    cases = []
    for name, us in (times or {"fla": 80.0, "unfused": 100.0, "fused": 50.0}).items():
        library = {"kind": "library", "version": "0.4"} if name == "fla" else {}
        numbers = {
            "samples": timed(us, us + CALL_US, turn=name != "fused"),
            "bytes_moved": 10**7,
            "flops": 10**9,
        }
        place = {
            "task": generated(f"1 x {seqlen:,}", dims=dims(seqlen)),
            "seqlen": seqlen,
            "inputs": "bf16, contiguous",
        }
        cases.append(case(name, **(place | numbers | library | fields)))
    return tuple(cases)


def bench(*made: Case, **fields) -> Report:
    return of_cases("bench", made or cell(), **fields)


def of_prefill(implementation: str = "fused", call_us: float | None = 1000.0, **fields) -> Case:
    """fields: of the case, or of its `Prefill`."""
    of_task = taken(fields, Prefill, but="kind")
    parts = {
        name: {"_kernel": share * (call_us or 1.0)}
        for name, share in (("operator", 0.3), ("mixer", 0.5))
    }
    whole = made_of(
        Prefill,
        of_task,
        kind="prefill",
        conv_and_norm="model",
        layers=40,
        layer_count=40,
        operator_layers=36,
        operator_calls=60,
        segment_length=1024,
        alone=layer(3),
        attention="sdpa",
        convolution="causal-conv1d 1.5",
        alone_us={"unfused": 10.0, "fused": 5.0}.get(implementation),
        parts=parts,
    )
    times = timed(None, call_us, turn=implementation == "unfused")
    return case(implementation, **({"samples": times, "task": whole} | fields))


def prefill(*made: Case, **fields) -> Report:
    return of_cases("prefill", made or (of_prefill("unfused", 2000.0), of_prefill()), **fields)


def decoded(state_format: str, *heads: Callable[[int], float | None], **fields) -> Case:
    """A layer's 4,096 tokens with states in a format.  heads: step -> the error of its output and
    of its state.  fields: of its `DecodedStates`.
    """
    marks = tuple(1 << power for power in range(13))
    errors = tuple(tuple(head(mark) for head in heads) for mark in marks)
    size = dims(marks[-1])
    task = made_of(
        DecodedStates,
        fields,
        kind="states",
        of=LayerCall(kind="layer", layer=layer(7), dims=size),
        step=1,
        marks=marks,
        out_errors=errors,
        state_errors=errors,
        memories=(3,) * len(heads),
        slot_bytes={"fp32": 4, "int8": 1}.get(state_format, 2) << 20,
    )
    precision = f"exact, {state_format} states"
    return case("recurrent", precision, task=task, seqlen=size.seqlen, baseline="")


def band(start: int = 0, stop: int = 1100, **fields) -> AnswerBand:
    return made_of(
        AnswerBand,
        fields,
        start=start,
        stop=stop,
        kl_mean=2e-3,
        kl_p99=1e-2,
        kl_max=0.1,
        kl_max_position=500,
        top1_pct=99.5,
        flips=5,
        flip_margin_median=0.01,
        flip_margin_max=0.05,
        flip_position=7,
        reference_perplexity=8.0,
        perplexity=8.01,
        perplexity_increase_pct=0.125,
        perplexity_interval_pct=(-0.1, 0.3),
    )


def of_answers(
    implementation: str = "fused", precision: PrecisionName = EXACT_FP32, **fields
) -> Case:
    """fields: of the case, or of its `Answers`."""
    of_task = taken(fields, Answers, but="kind")
    task = made_of(
        Answers,
        of_task,
        kind="answers",
        reference="fp64 oracle",
        weights="bf16",
        layers=(0,),
        segment_length=1100,
        bands=(band(), band(0, 275), band(275, 1100)),
    )
    usual = {"task": task, "seqlen": 1100, "baseline": "", "variant": ""}
    return case(implementation, precision, **(usual | fields))


def answers(*made: Case, **fields) -> Report:
    noise = of_answers("unfused", change="last bit of its inputs moved")
    return of_cases(
        "answers", made or (noise, of_answers()), **({"prompts": (prompt(1100),)} | fields)
    )


# --- what they are of


def checkpoint(**fields) -> CheckpointRef:
    return made_of(
        CheckpointRef,
        fields,
        requested="ibm-granite/granite-4.0",
        source="hub",
        repo_id="ibm-granite/granite-4.0-h-small",
        revision="0123456789abcdef0123456789abcdef01234567",
        model_type="granitemoehybrid",
        layer_count=40,
        trained_context=131_072,
        layers=tuple(layer(index) for index in range(40) if index not in (5, 15, 25, 35)),
        siblings=("ibm-granite/granite-4.0-h-tiny", "ibm-granite/granite-4.0-h-1b"),
    )


def environment(*, gpu: bool = True, triton: str = "3.6.0", **fields) -> Environment:
    """fields: of the GPU."""
    h200 = made_of(
        Gpu,
        fields,
        name="NVIDIA H200",
        compute_capability="9.0",
        sm_count=132,
        memory_bytes=150_754_820_096,
        l2_bytes=62_914_560,
        driver="580.65.06",
        cuda="13.0",
    )
    packages = {"torch": "2.11.0", "triton": triton, "transformers": "5.18.0"}
    return Environment(
        gpu=h200 if gpu else None,
        packages=packages,
        cpu="x86_64, 16 cores",
        platform="Linux 6.8",
        python="3.12.3",
    )


def clocks(**fields) -> Clocks:
    speeds = {"sm_mhz": (1980, 1965), "memory_mhz": (3201, 3201)}
    return made_of(Clocks, fields, temperature_c=(41, 63), throttle_reasons=(), **speeds)


def prompt(seqlen: int, **fields) -> Prompt:
    source = "public-domain prose shipped with ssdprof"
    tokenizer = "ibm-granite/granite-4.0-h-small"
    return made_of(
        Prompt,
        fields,
        seqlen=seqlen,
        kind="default",
        source=source,
        tokenizer=tokenizer,
        token_sha256="9f" * 32,
    )


def value(estimate: Estimate | None) -> float:
    return estimate.value


def accuracies(report: Report) -> list[tuple[Accuracy, ...]]:
    return [case.accuracy for case in report.cases]


def gates(*texts: str) -> tuple[Condition, ...]:
    return tuple(map(parse_gate, texts))
