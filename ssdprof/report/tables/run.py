"""Tables of the subject, the machine, the launches and the failures of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from ssdprof.report import format as fmt
from ssdprof.report.groups import groups, precision_order
from ssdprof.report.serving import serving_words
from ssdprof.report.tables import answers
from ssdprof.report.tables.table import Table, columns
from ssdprof.schema import CaseResult, Clocks, Environment, Launch, PrecisionRecord, Prompt, RunReport

_MOST_ROWS = 40  # if all cases fail, they have the same reason
_LONGEST_REASON = 300  # characters
_PRECISION = "intermediates,\nstates"
_RESOURCES = ("registers", "spills", "shared")


def facts(report: RunReport) -> Table:
    """The model, the prompt, the machine and the settings behind every number."""
    return Table(
        title="What ran",
        headers=("run", report.run_id),
        rows=tuple((name, value) for name, value in _facts(report) if value),
        align=("left", "left"),
        wraps=1,
    )


def launches(report: RunReport) -> Table | None:
    """Every kernel as it was launched, without duplicates."""
    used: dict[tuple[str, ...], list[CaseResult]] = {}
    for case in report.cases:
        for launch in case.launches:
            used.setdefault((case.implementation, case.variant, *_launch_cells(launch)), []).append(case)
    if not used:
        return None
    tokens = {case.dims.seqlen for case in report.cases}
    headers = ("implementation", "variant", "kernel", *_RESOURCES, "configuration", "used for")
    rows = [(*cells, _uses(cases, tokens, _precisions(report, cells[0]))) for cells, cases in used.items()]
    # the interpreter has no registers
    known = [
        i for i, name in enumerate(headers) if name not in _RESOURCES or any(row[i] != fmt.MISSING for row in rows)
    ]
    numbers = len(known) - len(headers) + len(_RESOURCES)
    return Table(
        title="Kernels as they were launched",
        headers=tuple(headers[i] for i in known),
        rows=tuple(tuple(row[i] for i in known) for row in rows),
        align=(*columns(3, numbers), *columns(2, 0)),
        note="Registers and spills are per thread, shared memory per block." if numbers else "",
        keys=3,
        wraps=3 + numbers,
    )


def failures(report: RunReport) -> Table | None:
    """Every case that did not pass."""
    return _cases(report, "Failures and refusals", lambda case: case.status != "passed")


def remarks(report: RunReport) -> Table | None:
    """Every case that passed with a remark."""
    return _cases(report, "Remarks on cases that passed", lambda case: case.status == "passed" and bool(case.reason))


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
    packages = {**others, "Python": environment.python, **environment.packages}
    return "versions", ", ".join(f"{name} {version}" for name, version in packages.items() if version)


def tuned(plans: Sequence[tuple[str, str]]) -> str:
    """A phrase on the cases, (implementation, reason of the plan), that did not use the committed configuration."""
    found = Counter(
        f"{implementation}: {part}"
        for implementation, plan in plans
        for part in plan.split("; ")
        if part.startswith("tuned ")
    )
    return "; ".join(f"{what} ({count} of {len(plans)} cases)" for what, count in found.items())


def _facts(report: RunReport) -> Iterator[tuple[str, str]]:
    ref, environment = report.checkpoint, report.environment
    yield "model", f"{ref.repo_id} ({ref.model_type}, {_SOURCES[ref.source]})"
    yield "revision", ref.revision or ""
    if ref.requested != ref.repo_id:
        yield "requested model", ref.requested
    yield "siblings", ", ".join(ref.siblings)
    yield "quantisation", ref.quantization or ""
    yield "layers", _layers(report) if report.captured_layers or not report.answers else ""
    for dims, indices in _shapes(report).items():
        yield "dimensions", dims if len(_shapes(report)) == 1 else f"{dims} (layers {fmt.indices(indices)})"
    for prompt in report.prompts:
        yield "prompt", _prompt(prompt)
    yield "served", _served(report)
    yield "inputs", str(report.cast or "")
    yield "tokenizer", ", ".join(dict.fromkeys(prompt.tokenizer for prompt in report.prompts))
    yield "segments", f"{fmt.tokens(report.segment_length)} per forward call of the model"
    yield "precisions", "; ".join(str(p) for p in _all_precisions(report))
    yield "baseline", _baselines(report) if report.cases else ""
    for other in report.asked.others if report.asked else ():
        yield _KINDS[other.kind], f"{other.name}, {other.source}, at {'; '.join(map(str, other.precisions))}"
    for one in report.answers:
        yield from answers.facts(one)
    yield "tuned", tuned([(case.implementation, case.plan) for case in report.cases])
    yield from gpu(environment)
    if report.ranks > 1:
        where = ", each on a GPU of its own," if environment.gpu else ""
        yield "ranks", f"{report.ranks} processes{where} shared the layers"
    if report.clocks:
        yield "clocks", clocks(report.clocks)
    if report.ceilings:
        yield (
            "ceilings",
            f"copy {report.ceilings.copy_gb_per_s:,.0f} GB/s (read + written), matrix product "
            f"{report.ceilings.matmul_tflops:,.0f} TFLOP/s, measured in this run",
        )
    if report.model_peak_bytes is not None:
        yield "peak memory", f"{fmt.size(report.model_peak_bytes)} of GPU memory, model and replay"
    yield "CPU", f"{environment.cpu}, {environment.platform}"
    yield versions(environment, ssdprof=report.ssdprof_version)
    yield "started", report.created
    yield "command", " ".join(report.command)


_KINDS = {"library": "another library", "own": "your kernel"}
_SOURCES = {"hub": "from the hub", "local": "a local folder", "demo": "built in"}


def clocks(clocks: Clocks) -> str:
    """Clocks before and after the timed region, and throttling."""
    pairs = (
        f"SM {clocks.sm_mhz[0]:,} MHz before, {clocks.sm_mhz[1]:,} after",
        f"memory {clocks.memory_mhz[0]:,} to {clocks.memory_mhz[1]:,} MHz",
        f"{clocks.temperature_c[0]} to {clocks.temperature_c[1]} °C",
        f"throttled: {', '.join(clocks.throttle_reasons)}" if clocks.throttle_reasons else "not throttled",
    )
    return ", ".join(pairs)


def _layers(report: RunReport) -> str:
    ref = report.checkpoint
    operators = "/".join(dict.fromkeys(layer.operator.upper() for layer in ref.layers))
    captured = [layer.index for layer in report.captured_layers]
    return (
        f"{len(captured)} of {len(ref.layers)} {operators} layers replayed ({fmt.indices(captured)}); "
        f"the model has {fmt.plural(ref.layer_count, 'layer')}"
    )


def _shapes(report: RunReport) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for case in report.cases:
        found.setdefault(str(case.dims), []).append(case.layer.index)
    return found


def _prompt(prompt: Prompt) -> str:
    size = fmt.tokens(prompt.seqlen, prompt.batch)
    kind = {"default": "built-in text", "file": "text file", "random": "random tokens"}[prompt.kind]
    return f"{size} of {kind}: {prompt.source}; sha256 of the ids {prompt.token_sha256[:16]}"


def _baselines(report: RunReport) -> str:
    names = dict.fromkeys(report.baseline_of(case.call) for case in report.cases)
    return fmt.words(f"{name} in decode steps" if name != report.baseline else name for name in names)


def _served(report: RunReport) -> str:
    """A phrase on how the prompts were run, which is the same for all."""
    ranks = report.asked.tensor_parallel if report.asked else 1
    found = (serving_words(one.serving, batch=one.batch, tensor_parallel=ranks) for one in report.prompts)
    return "; ".join(dict.fromkeys(words for words in found if words))


def _all_precisions(report: RunReport) -> list[PrecisionRecord]:
    return sorted({case.precision for case in report.cases}, key=precision_order)


def _precisions(report: RunReport, implementation: str) -> set[PrecisionRecord]:
    return {case.precision for case in report.cases if case.implementation == implementation}


def _launch_cells(launch: Launch) -> tuple[str, ...]:
    return (
        launch.kernel,
        fmt.count(launch.registers),
        fmt.count(launch.spills),
        fmt.size(launch.shared_bytes),
        ", ".join(f"{name}={value}" for name, value in launch.config.items()) or fmt.MISSING,
    )


def _uses(cases: list[CaseResult], tokens: set[int], precisions: set[PrecisionRecord]) -> str:
    """The prompts and precisions of a launch, or "all"."""
    used_tokens = sorted({case.dims.seqlen for case in cases}, reverse=True)
    used = sorted({case.precision for case in cases}, key=precision_order)
    parts = []
    if set(used) != precisions:
        parts.append("; ".join(str(p) for p in used))
    if set(used_tokens) != tokens:
        lengths = fmt.words(f"{n:,}" for n in used_tokens)
        parts.append(f"{lengths} {'token' if used_tokens == [1] else 'tokens'}")
    return " at ".join(parts) or "all"


def _cases(report: RunReport, title: str, wanted: Callable[[CaseResult], bool]) -> Table | None:
    """The selected cases; cases that differ only in the layer or the prompt share a row."""
    places: dict[tuple[str, ...], dict[str, list[int]]] = {}  # case -> prompt -> layers
    for group in groups(report):
        for case in filter(wanted, group.cases):
            tokens = group.tokens.removesuffix(" tokens") if group.call is None else group.size
            layers = places.setdefault(_case(case), {}).setdefault(tokens, [])
            layers.append(case.layer.index)
    if not places:
        return None
    rows: list[tuple[str, ...]] = []
    for cells, prompts in places.items():
        same: dict[str, list[str]] = {}
        for tokens, layers in prompts.items():
            same.setdefault(fmt.indices(layers), []).append(tokens)
        rows += [(where, "; ".join(tokens), *cells) for where, tokens in same.items()]
    hidden = len(rows) - _MOST_ROWS
    return Table(
        title=title,
        headers=("case", "layers", "tokens", "implementation", _PRECISION, "status", "reason", "first NaN\nor Inf"),
        rows=tuple((str(number), *row) for number, row in enumerate(rows[:_MOST_ROWS], start=1)),
        align=("right", *columns(7, 0)),
        note=f"{fmt.plural(hidden, 'more row')} left out; every case is in the JSON report." if hidden > 0 else "",
        keys=1,
        wraps=6,
    )


def _case(case: CaseResult) -> tuple[str, ...]:
    return (case.implementation, case.precision.short, case.status, _shortened(case.reason), _first_nonfinite(case))


def _first_nonfinite(case: CaseResult) -> str:
    for accuracy in case.accuracy:
        if accuracy.vs_oracle.first_nonfinite is not None:
            return f"{accuracy.tensor}{list(accuracy.vs_oracle.first_nonfinite)}"
    return fmt.MISSING


def _shortened(reason: str) -> str:
    reason = " ".join(reason.split())
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[: _LONGEST_REASON - 3]}..."
