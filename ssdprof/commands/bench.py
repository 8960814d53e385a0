"""`ssdprof bench`: the kernels alone, on random inputs of a model's shape, compared with other libraries."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from ssdprof import operators
from ssdprof.commands import output, terminal
from ssdprof.commands.options import BenchOptions
from ssdprof.commands.requests import BenchWords
from ssdprof.environment.toolchain import require_gpu
from ssdprof.errors import BadInputError
from ssdprof.jobs import bench as job
from ssdprof.operators.implementations import ImplementationCache, required
from ssdprof.operators.operator import Operator
from ssdprof.progress import Unwatched, Watcher
from ssdprof.report.document import compose
from ssdprof.report.terminal import render
from ssdprof.store.ranks import join
from ssdprof.store.tuned import use_saved


def bench(options: BenchOptions, asked: BenchWords) -> None:
    operator = operators.get(options.operator)
    if asked.chunk_sizes and not operator.generated.chunk_sizes:
        raise BadInputError(
            f"--chunk-size does not apply to {operator.name}: its kernels choose their own.", "Leave it out."
        )
    cache = ImplementationCache(torch.device("cuda"))
    found = [cache.get(operator, name) for name in asked.names]
    over = cache.get(operator, options.baseline or next(iter(asked.libraries), operator.baseline))
    matched = cache.get(operator, options.match_with or operator.baseline)
    if matched.name != operator.baseline and any(one.metric == "match" for one in asked.conditions):
        raise BadInputError(
            f"--min-match compares with {operator.baseline}, but --match-with names {matched.name}.",
            "Leave one of them out.",
        )
    drawn = ways(operator, options.draw)
    require_gpu(*job.NEEDS_GPU)
    compared = {one.name: one for one in (*found, required(over), *([required(matched)] if options.match_with else []))}
    ranks = join()
    reports = ranks is None or ranks.first  # the first rank reports for all
    watcher: Watcher = output.TerminalWatcher() if reports else Unwatched()
    if not options.no_tuned:
        use_saved(watcher.say)
    request = job.BenchRequest(
        operator=operator,
        cells=tuple(replace(cell, drawn=drawn) for cell in asked.cells),
        precisions=asked.precisions,
        implementations=tuple(compared.values()),
        baseline=over.name,
        match_with=matched.name,
        chunk_sizes=asked.chunk_sizes or operator.generated.chunk_sizes,
        check=options.check,
        budget=options.budget,
        first_call=options.first_call,
        smallest_difference=asked.smallest_difference,
        conditions=asked.conditions,
        out=options.out,
        command=terminal.command_line(),
    )
    for one in asked.too_large:
        watcher.say(f"{one} is left out: it has more than {options.max_tokens} tokens.")
    with terminal.only_data_on_stdout():
        folder, report = job.bench(request, watcher, ranks)
    if reports:
        output.finish(report, render(compose(report)), as_json=options.json, note=output.kept(folder))


def ways(operator: Operator[Any], words: str) -> tuple[str, ...]:
    """ "normalised,quarter-ungated" -> the words, each once, in the operator's order.  Raises BadInputError."""
    known = operator.generated.ways
    wanted = {word.strip() for word in words.split(",") if word.strip()}
    for word in sorted(wanted - known.keys()):
        meanings: Iterable[str] = (f"{name} ({meaning})" for name, meaning in known.items())
        raise BadInputError(
            f"--draw does not know {word!r}.", f"For {operator.name} there are: {', '.join(meanings) or 'none'}."
        )
    return tuple(word for word in known if word in wanted)
