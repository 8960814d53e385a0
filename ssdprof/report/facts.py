"""What a report says besides its tables: its origin, the meanings of its words, caveats, and the table "What ran"."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime

from ssdprof.core import words as fmt
from ssdprof.core.base import PrecisionRecord
from ssdprof.core.case import Case
from ssdprof.core.outcome import outcome
from ssdprof.core.report import Report
from ssdprof.core.subject import CheckpointRef, Clocks, Environment, Prompt
from ssdprof.report.groups import Group, case_words, groups, layer_of, precision_order, precision_words
from ssdprof.report.table import Table, facts

_SAME_AS = "the same as "  # the start of the part of a plan that names a precision with equal results
_KINDS = {"library": "another library", "own": "your kernel"}
_SOURCES = {"hub": "from the hub", "local": "a local folder", "demo": "built in"}
_PROMPTS = {"default": "built-in text", "file": "text file", "random": "random tokens"}
_MEANINGS = {
    "unfused": "ssdprof's own kernels with one launch per stage; the baseline, with exact intermediates",
    "fused": "the stages merged into as few kernel launches as is fastest",
    "recurrent": "one launch that goes token by token, with the state in registers",
    "unfused_step": "a decode step with one launch for each of its parts; the baseline of decode steps",
    "exact": "decays and their products are kept in fp32",
    "relaxed": "decays and their products in 16 bit: the inputs' dtype, or bf16 for fp32 inputs",
}
_IF_THERE = ("recurrent", "unfused_step")


def meanings(report: Report) -> tuple[tuple[str, str], ...]:
    """(word, meaning) for the words of the report."""
    ran = {case.implementation for case in report.cases}
    found = {word: meaning for word, meaning in _MEANINGS.items() if word not in _IF_THERE or word in ran}
    if report.baseline != "unfused":
        own = {"baseline": f"{report.baseline}, which the others are compared with"}
        found = own | found | {"unfused": _MEANINGS["unfused"].partition(";")[0]}
    return tuple(found.items())


def origin(report: Report) -> tuple[tuple[str, str], ...]:
    """(label, value) pairs shown before all numbers."""
    found = {
        "weights": weights(report.model) if report.model else "",
        "inputs": str(report.cast or ""),
        "GPU": gpu_name(report.environment),
        "when": when(report.created),
        "run": report.id if report.kind in ("run", "answers") else "",
    }
    return tuple((label, value) for label, value in found.items() if value)


def gpu_name(environment: Environment, none: str = "none") -> str:
    return environment.gpu.name if environment.gpu else none


def weights(ref: CheckpointRef) -> str:
    """ "random", "from the hub, revision 0123456789ab", "from a local folder, quantised (fp8)"."""
    if ref.random_weights:
        return "random"
    revision = f", revision {ref.revision[:12]}" if ref.revision else ""
    quantised = f", quantised ({ref.quantization})" if ref.quantization else ""
    where = {"hub": "from the hub", "local": "from a local folder", "demo": "trained, built in"}[ref.source]
    return f"{where}{revision}{quantised}"


def when(created: str) -> str:
    """ISO 8601 -> "2026-01-02 03:04 UTC"; any other text is unchanged."""
    try:
        time = datetime.fromisoformat(created)
    except ValueError:
        return created
    return f"{time:%Y-%m-%d %H:%M} {time.tzname() or ''}".rstrip()


# --- caveats


def caveats(report: Report) -> tuple[str, ...]:
    """Caveats that follow from the results, and the report's own notes."""
    if report.kind == "bench":
        left_out = (f"{one.place} was left out: {one.reason}" for one in report.left_out)
        return (*_of_baselines(report), *left_out)
    throttled = report.clocks.throttle_reasons if report.clocks else ()
    slow = (
        f"The GPU throttled while it was timed ({', '.join(throttled)}): absolute times are too "
        "long.  Speedups are valid, because the implementations were timed in turns."
    )
    return (*((slow,) if throttled else ()), *_of_calls(report), *report.remarks)


def _of_calls(report: Report) -> Iterator[str]:
    cases = report.of_calls
    timed = any(case.time_us for case in cases)
    if report.model and report.model.source == "demo" and timed:
        yield "The built-in demo model is too small to fill a GPU: its times do not represent a real model's."
    yield from _of_baselines(report)
    yield from _of_libraries(cases)
    yield from _equal_precisions(cases, timed)
    for group in groups(report):
        chunks = {case.dims.chunk_size for case in group.cases if case.dims and case.dims.chunk_size is not None}
        if chunks and (longest := _longest_sequence(report, group)) is not None and longest <= min(chunks):
            one = group.tokens if group.call is None else f"A sequence of at most {fmt.tokens(longest)}"
            are = "are" if group.call is None and group.seqlen > 1 else "is"
            yield (
                f"{one} {are} no more than one chunk of {fmt.words(map(str, sorted(chunks)), 'or')}: no state "
                "is passed on, so the dtype of the states is not tested."
            )


def _of_baselines(report: Report) -> Iterator[str]:
    """A caveat on each precision of a baseline outside its budget, with the errors where it is largest."""
    found: dict[str, list[Case]] = {}
    for case in outcome(report).outside:
        found.setdefault(case.label, []).append(case)
    for label, cases in found.items():
        worst = max(cases, key=_rms)
        rated = [one for one in report.cases if one.rated_against == (worst.place, worst.implementation)]
        rated.sort(key=lambda one: one.precision == worst.precision)  # where there is one, the same precision is shown
        errors = {one.implementation: fmt.small(_rms(one)) for one in rated if one.accuracy}
        timed = ", but timed" if worst.time_us else ""
        others = "".join(f", of {name} {error}" for name, error in errors.items())
        yield (
            f"The baseline is outside its error budget{timed}: {label} in {worst.place} (rms error "
            f"{fmt.small(_rms(worst))}{others})."
        )


def _rms(case: Case) -> float:
    """The RMS error of the output; infinite if it is unknown."""
    out = case.tensor("out")
    return math.inf if out is None or out.vs_oracle.rms_ratio is None else out.vs_oracle.rms_ratio


def _of_libraries(cases: Iterable[Case]) -> Iterator[str]:
    """Caveats on other libraries, which do not fail a run."""
    own = [case for case in cases if case.kind == "library" and case.baseline]
    troubles: dict[tuple[str, str], list[Case]] = {}
    for case in own:
        if case.result != "passed":
            troubles.setdefault((case.implementation, case.why), []).append(case)
    for (_, reason), found in troubles.items():
        yield f"Without a time: {case_words(found)}: {reason.rstrip('.')}."
    if outside := [case for case in own if case.result == "passed" and case.outside_budget]:
        yield f"Outside the error budget, but timed because it is another library's: {case_words(outside)}."


def _longest_sequence(report: Report, group: Group) -> int | None:
    """Tokens of the group's longest sequence; None if a call begins with a state."""
    if group.call is None or (group.call.kind == "chunk" and group.call.count == 1):
        return group.seqlen
    if group.call.kind != "packed":
        return None
    return max(length for prompt in report.prompts for length in prompt.serving.packed)


def _equal_precisions(cases: Iterable[Case], timed: bool) -> Iterator[str]:
    """The precisions of an implementation that give the same bits as another one, from the plans of its cases."""
    found: dict[tuple[str, str], dict[PrecisionRecord, None]] = {}
    for case in cases:
        for part in case.plan.split("; "):
            if part.startswith(_SAME_AS):
                found.setdefault((case.implementation, part.removeprefix(_SAME_AS)), {})[case.precision] = None
    for (implementation, other), precisions in found.items():
        ran = {precision_words(case.precision) for case in cases if case.implementation == implementation}
        which = fmt.words(precision_words(one) for one in sorted(precisions, key=precision_order))
        if ran <= {other, *map(precision_words, precisions)}:
            which = "every precision"
        said = f"{implementation} computes {which} as {other}: results are bitwise the same"
        if timed:
            said += ", and so is the time.  Speedups differ where each is over the baseline at its own state dtype"
        yield f"{said}."


# --- what ran


def what_ran(report: Report) -> Table:
    """The model, the prompt, the machine and the settings behind every number."""
    if report.kind == "prefill":
        return facts("What ran", ("prefill", ""), _of_prefill(report))
    return facts("What ran", ("run", report.id), _of_run(report))


def gpu(environment: Environment) -> Iterator[tuple[str, str]]:
    """The GPU and its driver."""
    found = environment.gpu
    if found is None:
        yield "GPU", "none"
        return
    yield (
        "GPU",
        f"{found.name}, {found.sm_count} SMs, compute capability {found.compute_capability}, "
        f"{fmt.size(found.memory_bytes)}, L2 {fmt.size(found.l2_bytes)}",
    )
    yield "driver", f"{found.driver}, CUDA {found.cuda}"


def versions(environment: Environment, **others: str) -> tuple[str, str]:
    """Of Python and packages.  others: first."""
    return "versions", environment_versions({**others, "Python": environment.python, **environment.packages})


def environment_versions(packages: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in packages.items() if version)


def tuned(cases: Iterable[Case]) -> str:
    """A phrase on the cases that did not use the committed configuration."""
    plans = [(case.implementation, case.plan) for case in cases]
    found = Counter(
        f"{implementation}: {part}"
        for implementation, plan in plans
        for part in plan.split("; ")
        if part.startswith("tuned ")
    )
    return "; ".join(f"{what} ({count} of {len(plans)} cases)" for what, count in found.items())


def clocks(clocks: Clocks | None) -> str:
    """Clocks before and after the timed region, and throttling."""
    if clocks is None:
        return ""
    return (
        f"SM {clocks.sm_mhz[0]:,} MHz before, {clocks.sm_mhz[1]:,} after, "
        f"memory {clocks.memory_mhz[0]:,} to {clocks.memory_mhz[1]:,} MHz, "
        f"{clocks.temperature_c[0]} to {clocks.temperature_c[1]} °C, "
        + (f"throttled: {', '.join(clocks.throttle_reasons)}" if clocks.throttle_reasons else "not throttled")
    )


def _of_run(report: Report) -> Iterator[tuple[str, str]]:
    ref, environment, cases = report.model, report.environment, report.of_calls
    assert ref
    yield "model", f"{ref.repo_id} ({ref.model_type}, {_SOURCES[ref.source]})"
    yield "revision", ref.revision or ""
    if ref.requested != ref.repo_id:
        yield "requested model", ref.requested
    yield "siblings", ", ".join(ref.siblings)
    yield "quantisation", ref.quantization or ""
    yield "layers", _layers(report, ref) if report.captured or not report.of_answers else ""
    shapes: dict[str, list[int]] = {}
    for case in cases:
        shapes.setdefault(str(case.dims), []).append(layer_of(case))
    for dims, indices in shapes.items():
        yield "dimensions", dims if len(shapes) == 1 else f"{dims} (layers {fmt.indices(indices)})"
    for prompt in report.prompts:
        yield "prompt", _prompt(prompt)
    served = [
        fmt.serving_words(one.serving, batch=one.batch, tensor_parallel=report.tensor_parallel)
        for one in report.prompts
    ]
    yield "served", "; ".join(dict.fromkeys(filter(None, served)))
    yield "inputs", str(report.cast or "")
    yield "tokenizer", ", ".join(dict.fromkeys(prompt.tokenizer for prompt in report.prompts))
    if report.segment_length:
        yield "segments", f"{fmt.tokens(report.segment_length)} per forward call of the model"
    yield "precisions", "; ".join(map(str, sorted({case.precision for case in cases}, key=precision_order)))
    names = dict.fromkeys(group.baseline for group in groups(report))
    yield (
        "baseline",
        fmt.words(f"{one} in decode steps" if one != report.baseline else one for one in names) if names else "",
    )
    others: dict[tuple[str, str, str], dict[str, None]] = {}
    for case in cases:
        if case.kind in _KINDS:
            source = (case.kind, case.implementation, case.version)
            others.setdefault(source, {})[str(case.precision)] = None
    for (kind, name, version), precisions in others.items():
        yield _KINDS[kind], f"{name}, {version}, at {'; '.join(precisions)}"
    yield from _of_answers(report)
    yield "tuned", tuned(cases)
    yield from gpu(environment)
    if report.ranks > 1:
        where = ", each on a GPU of its own," if environment.gpu else ""
        yield "ranks", f"{report.ranks} processes{where} shared the layers"
    yield "clocks", clocks(report.clocks)
    if report.ceilings:
        yield (
            "ceilings",
            f"copy {report.ceilings.copy_gb_per_s:,.0f} GB/s (read + written), matrix product "
            f"{report.ceilings.matmul_tflops:,.0f} TFLOP/s, measured in this run",
        )
    if report.peak_bytes is not None and report.of_calls:
        yield "peak memory", f"{fmt.size(report.peak_bytes)} of GPU memory, model and replay"
    yield "CPU", f"{environment.cpu}, {environment.platform}"
    yield versions(environment, ssdprof=report.ssdprof_version)
    yield "started", report.created
    yield "command", " ".join(report.command)


def _layers(report: Report, ref: CheckpointRef) -> str:
    operators = "/".join(dict.fromkeys(layer.operator.upper() for layer in ref.layers))
    captured = [layer.index for layer in report.captured]
    return (
        f"{len(captured)} of {len(ref.layers)} {operators} layers replayed ({fmt.indices(captured)}); "
        f"the model has {fmt.plural(ref.layer_count, 'layer')}"
    )


def _prompt(prompt: Prompt) -> str:
    size = fmt.tokens(prompt.seqlen, prompt.batch)
    return f"{size} of {_PROMPTS[prompt.kind]}: {prompt.source}; sha256 of the ids {prompt.token_sha256[:16]}"


def _of_answers(report: Report) -> Iterator[tuple[str, str]]:
    lengths: dict[int, list[Case]] = {}
    for case in report.of_answers:
        lengths.setdefault(case.seqlen, []).append(case)
    for seqlen, cases in lengths.items():
        found = cases[0].answers
        assert found
        took = f", {fmt.duration(report.seconds * 1e6)}" if len(lengths) == 1 and report.seconds else ""
        alone = report.peak_bytes is not None and not report.of_calls  # then the peak is that of the answers
        peak = f", peak memory {fmt.size(report.peak_bytes)} of the GPU" if alone else ""
        yield (
            f"answers, {fmt.tokens(seqlen)}",
            f"{fmt.plural(len(cases), 'case')} against {found.reference}, layers {fmt.indices(found.layers)}, "
            f"model in {found.weights}, segments of {found.segment_length:,}{took}{peak}",
        )


def _of_prefill(report: Report) -> Iterator[tuple[str, str]]:
    ref = report.model
    assert ref
    yield "model", f"{ref.repo_id} ({ref.model_type}){', random weights' if ref.random_weights else ''}"
    if found := next((case.prefill for case in report.of_prefill), None):
        yield (
            "layers",
            f"{found.layers} of {found.layer_count} were loaded and timed; {found.operator_layers} have the operator",
        )
        labels = (f"{case.implementation} {case.precision}" for case in report.of_prefill)
        yield "precisions", "; ".join(dict.fromkeys(labels))
        segments = {case.seqlen: case.prefill.segment_length for case in report.of_prefill if case.prefill}
        yield "segments", "; ".join(f"{fmt.tokens(seqlen)} by {each:,}" for seqlen, each in segments.items())
        yield "convolution", f"the model's own: {found.convolution}"
        yield "attention", found.attention
    yield from gpu(report.environment)
    yield "clocks", clocks(report.clocks)
    yield versions(report.environment, ssdprof=report.ssdprof_version)
    yield "started", report.created
    yield "command", " ".join(report.command)
