"""Options that make a command fail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from ssdprof.commands import options, terminal

if TYPE_CHECKING:
    from ssdprof.schema import Gates


@dataclass(frozen=True, kw_only=True)
class GateOptions:
    """The gates of speed and accuracy."""

    min_speedup: Annotated[
        float | None,
        typer.Option(
            metavar="X", min=0, help="Fail unless every case is X times as fast as the baseline, by device time."
        ),
    ] = None
    min_match: options.MinMatch = None
    max_rms_ratio: options.MaxRmsRatio = None
    config: options.Config = None

    def chosen(self) -> Gates:
        """The gates of the command line, completed by those of the settings file.  Raises BadInputError."""
        from ssdprof.settings import chosen_gates

        return chosen_gates(
            self.config, min_speedup=self.min_speedup, min_match=self.min_match, max_rms_ratio=self.max_rms_ratio
        )

    def judged_here(self, chosen: Gates) -> Gates:
        """The chosen gates that this machine can judge: without a GPU nothing is timed.

        Raises MissingCapabilityError if the minimum speedup was given on the command line.
        """
        import torch

        if chosen.min_speedup is None or torch.cuda.is_available():
            return chosen
        if self.min_speedup is not None:
            from ssdprof.environment.toolchain import require_gpu

            require_gpu("--min-speedup needs", "Run on a machine with an NVIDIA GPU, or leave --min-speedup out.")
        terminal.err().print("min-speedup of the settings file is not judged: this machine has no GPU.")
        return chosen.model_copy(update={"min_speedup": None})
