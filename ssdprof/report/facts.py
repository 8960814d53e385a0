"""The facts about a report: its origin, the meanings of its words, and the table "What ran".

The facts about a machine are here, too, for the reports of other commands.
"""

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

from ssdprof.core import words as fmt
from ssdprof.core.base import MEMORIES, PRECISIONS, grouped, intermediates_of
from ssdprof.core.case import Answers, Case, DecodedStates, Generated, Prefill
from ssdprof.core.report import Report
from ssdprof.core.target import CheckpointRef, Environment
from ssdprof.report.groups import groups, layer_of, numbered_layers
from ssdprof.report.table import Table, facts

Fact = tuple[str, str]  # name and value; facts with an empty value are not shown
# `Case.kind` of implementations that are not bundled -> the name of the fact about them
_NOT_BUNDLED = {
    "library": "another library",
    "own": "your kernel",
    "served": "what the server computed",
}
_SOURCES = {  # `CheckpointRef.source` -> its words
    "hub": "from the hub",
    "local": "from a local folder",
    "demo": "trained, built in",
    "recorded": "the recorded server's",
}
_PROMPTS = {  # `Prompt.kind` -> its words
    "default": "built-in text",
    "file": "text file",
    "random": "random tokens",
    "recorded": "a recording",
}
_MEANINGS = {  # implementation or intermediates -> the meaning of the name
    "unfused": "ssdprof's own kernels with one launch per stage",
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
    """(word, meaning) for the implementations and intermediates of the report.

    The meaning of the baseline's name says that it is the baseline.  A baseline that has no meaning
    here, such as a library, or no case, is explained first, under the word "baseline".
    """
    used = {case.implementation for case in report.cases}
    used |= {intermediates_of(case.precision) for case in report.cases}
    words = {word: meaning for word, meaning in _MEANINGS.items() if word in used}
    if report.baseline in words:
        words[report.baseline] += "; the baseline"
        return tuple(words.items())
    return (("baseline", f"{report.baseline}, which the others are compared with"), *words.items())


def origin(report: Report) -> tuple[Fact, ...]:
    """The (label, value) pairs that are shown before all numbers.

    Weights of a recording are not known.  Only a run and answers are named by their folder here.
    """
    values = {
        "weights": weights(report.model) if report.model and not report.is_recorded else "",
        "inputs": report.cast_words,
        "GPU": gpu_name(report.environment),
        "when": when(report.created),
        "run": report.id if report.kind in ("run", "answers") else "",
    }
    return tuple((label, value) for label, value in values.items() if value)


def gpu_name(environment: Environment, none: str = "none") -> str:
    """The name of the GPU.  none: what stands in its place on a machine without a GPU."""
    return environment.gpu.name if environment.gpu else none


def versions_of(report: Report, packages: Iterable[str], missing: str) -> dict[str, str]:
    """The GPU's name and the versions of its driver, of ssdprof and of some packages.

    missing: what stands in place of the version of a driver without a GPU, or of a package that is
        not installed.
    """
    gpu = report.environment.gpu
    installed = report.environment.packages
    return {
        "GPU": gpu_name(report.environment),
        "driver": gpu.driver if gpu else missing,
        "ssdprof": report.ssdprof_version,
        **{name: installed.get(name, missing) for name in packages},
    }


def weights(ref: CheckpointRef) -> str:
    """The origin of the weights: "random", "from the hub, revision 0123456789ab", "from a local
    folder, quantised (fp8)".
    """
    if ref.random_weights:
        return "random"
    revision = f", revision {ref.revision[:12]}" if ref.revision else ""
    quantised = f", quantised ({ref.quantization})" if ref.quantization else ""
    return f"{_SOURCES[ref.source]}{revision}{quantised}"


def when(created: str) -> str:
    """A time in ISO 8601 as "2026-01-02 03:04 UTC", without a zone if it has none.  Any other text
    is returned unchanged.
    """
    try:
        time = datetime.fromisoformat(created)
    except ValueError:
        return created
    return f"{time:%Y-%m-%d %H:%M} {time.tzname() or ''}".rstrip()


# --- what ran


def what_ran(report: Report) -> Table:
    """The table of the model, the prompts, the settings and the machine behind every number."""
    rows = (*_target(report), *_settings(report), *_machine(report))
    return facts("What ran", (report.kind, report.id), rows)


def gpu(environment: Environment) -> Iterator[Fact]:
    """The facts about the GPU and its driver, or that there is none."""
    device = environment.gpu
    if device is None:
        yield "GPU", "none"
        return
    sizes = f"{fmt.size_words(device.memory_bytes)}, L2 {fmt.size_words(device.l2_bytes)}"
    yield (
        "GPU",
        f"{device.name}, {device.sm_count} SMs, compute capability {device.compute_capability}, "
        f"{sizes}",
    )
    yield "driver", f"{device.driver}, CUDA {device.cuda}"


def software(environment: Environment, **others: str) -> Fact:
    """The versions of Python and of the packages.

    others: further versions by name, which are shown first; those that are empty are left out.
    """
    versions = {**others, "Python": environment.python, **environment.packages}
    known = (f"{name} {version}" for name, version in versions.items() if version)
    return "versions", ", ".join(known)


def _target(report: Report) -> Iterator[Fact]:
    """The facts about what was measured: the model, its operators, and its prompts."""
    if report.model:
        yield from _model(report, report.model)
    yield from _prefill(report)
    with_layer = (case for case in report.cases if case.layer)
    dimensions = grouped(with_layer, lambda case: str(case.dims))
    for dims, cases in dimensions.items():
        layers = f" ({numbered_layers(map(layer_of, cases))})"
        yield "dimensions", dims if len(dimensions) == 1 else f"{dims}{layers}"
    gates: dict[str, Sequence[int]] = {}  # layer -> numbers of heads: see `ProcessLine.gates`
    for process in report.processes:
        gates |= process.gates
    if gates:
        lengths = fmt.words(f"{length:,}" for length in MEMORIES)
        heads = "; ".join(
            f"layer {layer}: {', '.join(map(str, counts))}" for layer, counts in gates.items()
        )
        yield "gates", f"heads that forget within {lengths} tokens, and hardly at all: {heads}"
    yield from _prompts(report)
    yield "inputs", report.cast_words
    yield "tokenizer", ", ".join(dict.fromkeys(prompt.tokenizer for prompt in report.prompts))
    if report.segment_length and not report.is_recorded:
        yield "segments", f"{fmt.tokens(report.segment_length)} per forward call of the model"


def _model(report: Report, model: CheckpointRef) -> Iterator[Fact]:
    """The facts about the checkpoint, and about the layers that were replayed."""
    random = ", random weights" if model.random_weights else ""
    yield "model", f"{model.repo_id} ({model.model_type}, {_SOURCES[model.source]}){random}"
    yield "revision", model.revision or ""
    yield "requested model", model.requested if model.requested != model.repo_id else ""
    yield "siblings", ", ".join(model.siblings)
    yield "quantisation", model.quantization or ""
    if report.captured or report.kind == "run":
        operators = "/".join(dict.fromkeys(layer.operator.upper() for layer in model.layers))
        captured = [layer.index for layer in report.captured]
        replayed = (
            f"{len(captured)} of {len(model.layers)} {operators} layers replayed "
            f"({fmt.indices(captured)})"
        )
        if not report.is_recorded:
            replayed += f"; the model has {fmt.plural(model.layer_count, 'layer')}"
        yield "layers", replayed


def _prefill(report: Report) -> Iterator[Fact]:
    """The facts about prefills: the loaded layers, and how the model was called.  None without a
    prefill.

    All prefills of a report share them, except for the length of a segment, which depends on that
    of the prompt.
    """
    prefills = {case.seqlen: case.task for case in report.cases if isinstance(case.task, Prefill)}
    if not prefills:
        return
    first = next(iter(prefills.values()))
    yield (
        "layers",
        f"{first.layers} of {first.layer_count} were loaded and timed; {first.operator_layers} "
        "have the operator",
    )
    segments = (
        f"{fmt.tokens(seqlen)} by {task.segment_length:,}" for seqlen, task in prefills.items()
    )
    yield "segments", "; ".join(segments)
    yield "convolution", f"the model's own: {first.convolution}"
    yield "attention", first.attention


def _prompts(report: Report) -> Iterator[Fact]:
    """A fact for each prompt, and one for how the model ran the prompts."""
    serving: dict[str, None] = {}  # distinct words, in the order of the prompts
    for prompt in report.prompts:
        yield (
            "prompt",
            f"{fmt.tokens(prompt.seqlen, prompt.batch)} of {_PROMPTS[prompt.kind]}: "
            f"{prompt.source}; sha256 of the ids {prompt.token_sha256[:16]}",
        )
        words = fmt.serving_words(
            prompt.serving, batch=prompt.batch, tensor_parallel=report.tensor_parallel
        )
        serving[words] = None
    yield "served", "; ".join(filter(None, serving))


def _settings(report: Report) -> Iterator[Fact]:
    """The facts about the comparison: precisions, baselines, other implementations, answers, the
    machine code of kernels, and tuned configurations.
    """
    cases = [case for case in report.cases if not isinstance(case.task, Answers | DecodedStates)]
    precisions = {case.precision for case in cases}
    yield "precisions", "; ".join(sorted(precisions, key=PRECISIONS.index))
    baselines = {report.baseline: None}  # distinct words, those of decode steps last
    for group in groups(report):
        if group.are_steps and group.baseline != report.baseline:
            baselines[f"{group.baseline} in decode steps"] = None
    yield "baseline", fmt.words(baselines)
    not_bundled = (case for case in cases if case.kind in _NOT_BUNDLED)
    by_version = grouped(not_bundled, lambda case: (case.kind, case.implementation, case.version))
    for (kind, name, version), of_version in by_version.items():
        precisions_of_version = "; ".join(dict.fromkeys(case.precision for case in of_version))
        which = ", ".join(filter(None, dict.fromkeys((name, version))))
        yield _NOT_BUNDLED[kind], f"{which}, at {precisions_of_version}"
    for seqlen, of_length in grouped(report.of_answers, lambda case: case.seqlen).items():
        answers = of_length[0].task  # the others have the same reference, layers and segments
        assert isinstance(answers, Answers)
        yield (
            f"answers, {fmt.tokens(seqlen)}",
            f"{answers_words(of_length)} against {answers.reference}, "
            f"{numbered_layers(answers.layers)}, model in {answers.weights}, "
            f"segments of {answers.segment_length:,}",
        )
    generated = (case.task for case in cases if isinstance(case.task, Generated))
    if checked := sorted({task.checked for task in generated if task.checked}):
        lengths = fmt.words(f"{length:,}" for length in checked)
        yield "compared on", f"one sequence of {lengths} tokens, not on every token that was timed"
    yield "kernels", report.kernels and f"machine code of sha256 {report.kernels[:12]}"
    tuned: Counter[str] = Counter()
    for case in cases:
        for part in case.plan.split("; "):
            if part.startswith("tuned "):
                tuned[f"{case.implementation}: {part}"] += 1
    all_cases = fmt.plural(len(cases), "case")
    yield "tuned", "; ".join(f"{name} ({count} of {all_cases})" for name, count in tuned.items())


def answers_words(cases: Sequence[Case]) -> str:
    """The number of cases that gates apply to, and of the others: "4 cases (and 10 of noise or
    single layers)".
    """
    gated = sum(case.is_gated for case in cases)
    others = len(cases) - gated
    words = fmt.plural(gated, "case")
    return f"{words} (and {others} of noise or single layers)" if others else words


def _machine(report: Report) -> Iterator[Fact]:
    """The facts about the machine and its use: processes, clocks, ceilings, memory, versions,
    times, the commit and the command.
    """
    environment = report.environment
    yield from gpu(environment)
    if report.ranks > 1:
        where = ", each on a GPU of its own," if environment.gpu else ""
        yield "ranks", f"{report.ranks} processes{where} shared the cases"
    if report.samplers > 1:
        yield "samples", f"of {report.samplers} processes, one after another"
    if clocks := report.clocks:
        sm = "SM {:,} MHz before, {:,} after".format(*clocks.sm_mhz)
        memory = "{:,} to {:,} MHz".format(*clocks.memory_mhz)
        heat = "{} to {} °C".format(*clocks.temperature_c)
        throttled = "not throttled"
        if clocks.throttle_reasons:
            throttled = f"throttled: {', '.join(clocks.throttle_reasons)}"
        yield "clocks", f"{sm}, memory {memory}, {heat}, {throttled}"
    if ceilings := report.ceilings:
        yield (
            "ceilings",
            f"copy {ceilings.copy_gb_per_s:,.0f} GB/s (read + written), "
            f"matrix product {ceilings.matmul_tflops:,.0f} TFLOP/s, measured in this run",
        )
    if report.peak_bytes is not None and report.kind != "prefill":
        yield "peak memory", f"{fmt.size_words(report.peak_bytes)} of GPU memory"
    yield "CPU", f"{environment.cpu}, {environment.platform}"
    yield "duration", f"{report.seconds:.0f} s" if report.seconds else ""
    yield software(environment, ssdprof=report.ssdprof_version)
    yield "started", report.created
    yield "commit", report.commit
    yield "command", shlex.join(report.command)
