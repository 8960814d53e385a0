"""One page on all published comparisons: the claims that hold and those that do not, with reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from reproducing import judging
from reproducing.judging import INSIDE, NOT_MEASURED, OUTSIDE, Verdict
from reproducing.published import Published
from reproducing.result import Result

HEAD = """\
# What the sources state, and what was measured

A claim **holds** if the measured values are inside what is quoted, and does not if they are outside.  A claim about a
ratio is judged on any GPU; one about a time on the quoted GPU only.  What was measured stands beside every claim in the
comparison's own page, with what the source leaves open and what was chosen.
"""
GROUPS = ((INSIDE, "Holds"), (OUTSIDE, "Does not hold"), ("", "Cannot be said"))


def page(found: Sequence[tuple[str, Published, Sequence[Result]]]) -> str:
    """found: name, document, and results of one or more GPUs.  A comparison without a result is also named."""
    parts = [HEAD, *_summary(found)]
    for name, document, results in found:
        parts.append(f"## {document.title}\n\n{document.source}  GPU of the source: {document.gpu}.")
        if not results:
            parts.append(f"Not measured yet: `python benchmarks/reproduce.py {name}`.")
        for result in results:
            parts += _of_result(document, result)
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _summary(found: Sequence[tuple[str, Published, Sequence[Result]]]) -> Iterator[str]:
    lines = ["| comparison | GPU | holds | does not hold | cannot be said |", "|:--|:--|--:|--:|--:|"]
    for name, document, results in found:
        if not results:
            lines.append(f"| {name} | not measured yet | | | |")
        for result in results:
            counts = Counter(_group(one) for one in judging.claims(document, result.values, result.gpu))
            numbers = " | ".join(str(counts[words]) for _, words in GROUPS)
            lines.append(f"| {name} | {result.gpu} | {numbers} |")
    yield "\n".join(lines)


def _group(verdict: Verdict) -> str:
    return next(words for start, words in GROUPS if verdict.verdict.startswith(start))


def _of_result(document: Published, result: Result) -> Iterator[str]:
    """The results of one GPU, group by group."""
    yield f"### On {result.gpu}"
    yield " ".join((*result.origin, f"[All numbers](published/{result.folder}/{result.name}.md)."))
    found = judging.claims(document, result.values, result.gpu)
    for _, words in GROUPS:
        lines = [_line(one) for one in found if _group(one) == words]
        if lines:
            yield f"**{words}**"
            yield "\n".join(lines)
    if result.wrong:
        yield "**Outputs were wrong**"
        yield "\n".join(f"- {one}" for one in result.wrong)


def _line(one: Verdict) -> str:
    measured = one.measured if one.verdict == NOT_MEASURED else f"measured {one.measured}"
    sentences = (f"  {words[0].upper()}{words[1:].rstrip('.')}." for words in (one.note, one.reason) if words)
    return f"- {one.claim}: quoted {one.quoted}; {measured}.{''.join(sentences)}"
