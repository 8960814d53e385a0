"""The results that `ssdprof export` reads: of a run, a bench or prefill."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ssdprof.commands import terminal

if TYPE_CHECKING:
    from ssdprof.bench.schema import BenchReport
    from ssdprof.report.exports.exported import Exported
    from ssdprof.schema import RunReport
    from ssdprof.schema.prefill import PrefillReport


@dataclass(frozen=True, kw_only=True)
class KeptRun:
    """source: its folder."""

    source: Path
    report: RunReport

    def exported(self) -> Exported:
        from ssdprof.report.exports.exported import from_run

        return from_run(self.report)

    def markdown(self, output: Path | None) -> str:
        """output: the output file, next to which pictures are written; None for stdout."""
        from ssdprof.jobs import stall_files
        from ssdprof.report import markdown

        text = markdown.render(self.report)
        stalls = stall_files.of_run(self.source)
        if stalls is None:
            return text
        figures = stall_files.write_pictures(output, stalls) if output else {}
        return f"{text}\n{stall_files.as_markdown(stalls, figures)}"

    def html(self) -> str:
        from ssdprof.jobs import stall_files
        from ssdprof.report import html

        return html.render(self.report, stall_files.of_run(self.source))

    def json(self) -> str:
        from ssdprof.runs import document

        return document.dump(self.report)

    def exit(self) -> None:
        """End with exit code 1 unless everything was compared and passed."""
        terminal.exit_by(self.report)


@dataclass(frozen=True, kw_only=True)
class KeptBench:
    """source: its file."""

    source: Path
    report: BenchReport

    def exported(self) -> Exported:
        from ssdprof.bench.exported import from_bench

        return from_bench(self.report)

    def markdown(self, _output: Path | None) -> str:
        from ssdprof.bench.render import as_markdown

        return as_markdown(self.report)

    def html(self) -> str:
        from ssdprof.errors import BadInputError

        raise BadInputError("There is no HTML report of a bench.", "Export it with --format markdown or csv.")

    def json(self) -> str:
        from ssdprof.bench.schema import dump

        return dump(self.report)

    def exit(self) -> None:
        """As `ssdprof bench` ended: with exit code 1 if a case of ours or a gate failed."""
        from ssdprof.bench import gate

        if lines := gate.wrong(self.report) + gate.failed(self.report):
            terminal.gate_failed(lines)


@dataclass(frozen=True, kw_only=True)
class KeptPrefill:
    """source: its file."""

    source: Path
    report: PrefillReport

    def exported(self) -> Exported:
        from ssdprof.report.exports.prefill import from_prefill

        return from_prefill(self.report)

    def markdown(self, _output: Path | None) -> str:
        from ssdprof.report import markdown, prefill_document

        return markdown.render_document(prefill_document.compose(self.report))

    def html(self) -> str:
        from ssdprof.report import html, prefill_document

        document = prefill_document.compose(self.report)
        return html.render_document(document, good=prefill_document.GOOD, version=self.report.ssdprof_version)

    def json(self) -> str:
        from ssdprof.runs import prefill_file

        return prefill_file.dump(self.report)

    def exit(self) -> None:
        """With exit code 1 if a case or a gate failed, or if the command did not reach its end."""
        if lines := self.exported().errors:
            terminal.gate_failed(lines)


Kept = KeptRun | KeptBench | KeptPrefill


def read(where: str | None) -> Kept:
    """A run's folder or name, its report as JSON, a result of a bench or of prefill, or None for the latest run.

    Raises BadInputError.
    """
    from ssdprof import runs
    from ssdprof.bench import file
    from ssdprof.runs import prefill_file

    if where is not None and Path(where).is_file() and file.is_bench(Path(where)):
        return KeptBench(source=Path(where), report=file.read(Path(where)))
    if where is not None and Path(where).is_file() and prefill_file.is_prefill(Path(where)):
        return KeptPrefill(source=Path(where), report=prefill_file.read(Path(where)))
    folder, report = runs.read(where)
    return KeptRun(source=folder, report=report)
