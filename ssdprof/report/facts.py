"""What a report says besides its tables: its origin, the meanings of its words, and the table "What
ran".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import datetime

from ssdprof.core import words as fmt
from ssdprof.core.base import MEMORIES, PRECISIONS, grouped, intermediates_of
from ssdprof.core.case import Answers, Drawn, Prefill
from ssdprof.core.report import Report
from ssdprof.core.subject import CheckpointRef, Environment
from ssdprof.report.groups import groups, layer_of
from ssdprof.report.table import Table, facts

Fact = tuple[str, str]  # name and value; those without a value are not shown
_KINDS = {"library": "another library", "own": "your kernel", "served": "what the server computed"}
_SOURCES = {"hub": "from the hub", "local": "a local folder", "demo": "built in"}
_MEANINGS = {
    "unfused": (
        "ssdprof's own kernels with one launch per stage; the baseline, with exact intermediates"
    ),
    "fused": "the stages merged into as few kernel launches as is fastest",
    "recurrent": "one launch that goes token by token, with the state in registers",
    "unfused_step": (
        "a decode step with one launch for each of its parts; the baseline of decode steps"
    ),
    "served": "what the server computed when its calls were recorded",
    "exact": "decays and their products are kept in fp32",
    "relaxed": (
        "decays and their products in 16 bit, the inputs' dtype; fp32 inputs in bf16 or tf32"
    ),
}


def meanings(report: Report) -> tuple[Fact, ...]:
    """(word, meaning) for the words of the report."""
    said = {
        word
        for case in report.cases
        for word in (case.implementation, intermediates_of(case.precision))
    }
    found = {word: meaning for word, meaning in _MEANINGS.items() if word in said}
    if report.baseline != "unfused":
        found = {"baseline": f"{report.baseline}, which the others are compared with"} | found
        if "unfused" in found:
            found["unfused"] = found["unfused"].partition(";")[0]
    return tuple(found.items())


def origin(report: Report) -> tuple[Fact, ...]:
    """(label, value) pairs shown before all numbers."""
    found = {
        "weights": weights(report.model) if report.model else "",
        "inputs": report.cast_words,
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
    where = {"hub": "from the hub", "local": "from a local folder", "demo": "trained, built in"}[
        ref.source
    ]
    return f"{where}{revision}{quantised}"


def when(created: str) -> str:
    """ISO 8601 -> "2026-01-02 03:04 UTC"; any other text is unchanged."""
    try:
        time = datetime.fromisoformat(created)
    except ValueError:
        return created
    return f"{time:%Y-%m-%d %H:%M} {time.tzname() or ''}".rstrip()


# --- what ran


def what_ran(report: Report) -> Table | None:
    """The model, the prompt, the machine and the settings behind every number."""
    found = (*_subject(report), *_settings(report), *_machine(report))
    return facts("What ran", (report.kind, report.id), found)


def gpu(environment: Environment) -> Iterator[Fact]:
    """The GPU and its driver."""
    if found := environment.gpu:
        sizes = f"{fmt.size_words(found.memory_bytes)}, L2 {fmt.size_words(found.l2_bytes)}"
        yield (
            "GPU",
            (
                f"{found.name}, {found.sm_count} SMs, compute capability "
                f"{found.compute_capability}, "
                f"{sizes}"
            ),
        )
        yield "driver", f"{found.driver}, CUDA {found.cuda}"
    else:
        yield "GPU", "none"


def software(environment: Environment, **others: str) -> Fact:
    """Of Python and packages.  others: first."""
    found = {**others, "Python": environment.python, **environment.packages}
    return "versions", ", ".join(f"{name} {version}" for name, version in found.items() if version)


def _subject(report: Report) -> Iterator[Fact]:
    if ref := report.model:
        random = ", random weights" * ref.random_weights
        yield "model", f"{ref.repo_id} ({ref.model_type}, {_SOURCES[ref.source]}){random}"
        yield "revision", ref.revision or ""
        yield "requested model", ref.requested if ref.requested != ref.repo_id else ""
        yield "siblings", ", ".join(ref.siblings)
        yield "quantisation", ref.quantization or ""
        if report.captured or report.kind == "run":
            operators = "/".join(dict.fromkeys(layer.operator.upper() for layer in ref.layers))
            captured = [layer.index for layer in report.captured]
            replayed = (
                f"{len(captured)} of {len(ref.layers)} {operators} layers replayed "
                f"({fmt.indices(captured)})"
            )
            yield "layers", f"{replayed}; the model has {fmt.plural(ref.layer_count, 'layer')}"
    prefills = [
        (case.seqlen, one) for case in report.cases if isinstance(one := case.task, Prefill)
    ]
    for _, found in prefills[:1]:
        loaded = f"{found.layers} of {found.layer_count} were loaded and timed"
        yield "layers", f"{loaded}; {found.operator_layers} have the operator"
        segments = {seqlen: one.segment_length for seqlen, one in prefills}
        yield (
            "segments",
            "; ".join(f"{fmt.tokens(seqlen)} by {each:,}" for seqlen, each in segments.items()),
        )
        yield "convolution", f"the model's own: {found.convolution}"
        yield "attention", found.attention
    shapes = grouped((case for case in report.cases if case.layer), lambda case: str(case.dims))
    for dims, own in shapes.items():
        yield (
            "dimensions",
            dims if len(shapes) == 1 else f"{dims} (layers {fmt.indices(map(layer_of, own))})",
        )
    if gates := {name: heads for one in report.processes for name, heads in one.gates.items()}:
        lengths = fmt.words(f"{length:,}" for length in MEMORIES)
        heads = "; ".join(
            f"layer {name}: {', '.join(map(str, own))}" for name, own in gates.items()
        )
        yield "gates", f"heads that forget within {lengths} tokens, and hardly at all: {heads}"
    served = []
    for prompt in report.prompts:
        kind = {
            "default": "built-in text",
            "file": "text file",
            "random": "random tokens",
            "recorded": "a recording",
        }[prompt.kind]
        digest = f"sha256 of the ids {prompt.token_sha256[:16]}"
        yield (
            "prompt",
            f"{fmt.tokens(prompt.seqlen, prompt.batch)} of {kind}: {prompt.source}; {digest}",
        )
        served.append(
            fmt.serving_words(
                prompt.serving, batch=prompt.batch, tensor_parallel=report.tensor_parallel
            )
        )
    yield "served", "; ".join(dict.fromkeys(filter(None, served)))
    yield "inputs", report.cast_words
    yield "tokenizer", ", ".join(dict.fromkeys(prompt.tokenizer for prompt in report.prompts))
    if report.segment_length:
        yield "segments", f"{fmt.tokens(report.segment_length)} per forward call of the model"


def _settings(report: Report) -> Iterator[Fact]:
    """What was compared with what."""
    cases = [case for case in report.cases if not isinstance(case.task, Answers)]
    yield (
        "precisions",
        "; ".join(sorted({case.precision for case in cases}, key=PRECISIONS.index)),
    )
    names = dict.fromkeys(group.baseline for group in groups(report) if group.layers[0] >= 0) or {
        report.baseline: None
    }
    yield (
        "baseline",
        fmt.words(one if one == report.baseline else f"{one} in decode steps" for one in names),
    )
    others = grouped(
        (case for case in cases if case.kind in _KINDS),
        lambda case: (case.kind, case.implementation, case.version),
    )
    for (kind, name, version), own in others.items():
        precisions = "; ".join(dict.fromkeys(case.precision for case in own))
        yield _KINDS[kind], f"{name}, {version}, at {precisions}"
    for seqlen, own in grouped(report.of_answers, lambda case: case.seqlen).items():
        answers = own[0].task
        assert isinstance(answers, Answers)
        compared = (
            f"{fmt.plural(len(own), 'case')} against {answers.reference}, layers "
            f"{fmt.indices(answers.layers)}"
        )
        ran = f"model in {answers.weights}, segments of {answers.segment_length:,}"
        yield f"answers, {fmt.tokens(seqlen)}", f"{compared}, {ran}"
    drawn = (case.task for case in cases if isinstance(case.task, Drawn))
    if checked := sorted({one.checked for one in drawn if one.checked}):
        lengths = fmt.words(f"{length:,}" for length in checked)
        yield "compared on", f"one sequence of {lengths} tokens, not on every token that was timed"
    yield "kernels", report.kernels and f"machine code of sha256 {report.kernels[:12]}"
    plans = [(case.implementation, case.plan.split("; ")) for case in cases]
    tuned = Counter(
        f"{name}: {part}" for name, plan in plans for part in plan if part.startswith("tuned ")
    )
    yield (
        "tuned",
        "; ".join(f"{what} ({count} of {len(plans)} cases)" for what, count in tuned.items()),
    )


def _machine(report: Report) -> Iterator[Fact]:
    """Clocks before and after the timed region, throttling, and versions."""
    environment = report.environment
    yield from gpu(environment)
    if report.ranks > 1:
        where = ", each on a GPU of its own," if environment.gpu else ""
        yield "ranks", f"{report.ranks} processes{where} shared the cases"
    if report.samplers > 1:
        yield "samples", f"of {report.samplers} processes, one after another"
    if found := report.clocks:
        sm = "SM {:,} MHz before, {:,} after".format(*found.sm_mhz)
        memory = "{:,} to {:,} MHz".format(*found.memory_mhz)
        heat = "{} to {} °C".format(*found.temperature_c)
        throttled = (
            f"throttled: {', '.join(found.throttle_reasons)}"
            if found.throttle_reasons
            else "not throttled"
        )
        yield "clocks", f"{sm}, memory {memory}, {heat}, {throttled}"
    if ceilings := report.ceilings:
        copy = f"copy {ceilings.copy_gb_per_s:,.0f} GB/s (read + written)"
        yield (
            "ceilings",
            f"{copy}, matrix product {ceilings.matmul_tflops:,.0f} TFLOP/s, measured in this run",
        )
    if report.peak_bytes is not None and report.kind != "prefill":
        yield "peak memory", f"{fmt.size_words(report.peak_bytes)} of GPU memory"
    yield "CPU", f"{environment.cpu}, {environment.platform}"
    yield "duration", f"{report.seconds:.0f} s" if report.seconds else ""
    yield software(environment, ssdprof=report.ssdprof_version)
    yield "started", report.created
    yield "commit", report.commit
    yield "command", " ".join(report.command)
