"""Options that choose a model and run it on a prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ssdprof.commands.options import existing_file

if TYPE_CHECKING:
    from ssdprof.jobs.request import CaptureRequest

MODEL_HELP = "Hub id, local folder, family name, [bold]demo[/bold] or [bold]demo-gdn[/bold]."


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model, its layers, and the prompt."""

    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)]
    seq: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="Tokens of the prompt: 16384, 128k, or several: 1k,16k.",
            show_default="16k on a GPU, 512 without",
        ),
    ] = None
    layers: Annotated[str, typer.Option(metavar="WHICH", help="all, first:N, every:K, or layer numbers: 3,7, 0-3.")] = (
        "all"
    )
    prompt: Annotated[
        Literal["default", "random"],
        typer.Option(help="The built-in text, or random tokens, which are unlike a real prompt."),
    ] = "default"
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Take the prompt from a UTF-8 text file.", parser=existing_file, show_default=False
        ),
    ] = None
    revision: Annotated[
        str | None,
        typer.Option(metavar="REV", help="Branch, tag or commit on the hub.", show_default="the main branch"),
    ] = None
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Take the tokenizer from another model.", show_default="the model's own"),
    ] = None
    segment: Annotated[
        str | None,
        typer.Option(metavar="N", help="Tokens per forward call of the model: 8192, or 8k.", show_default="by length"),
    ] = None

    def request(self) -> CaptureRequest:
        """Raises BadInputError."""
        from ssdprof.capture.prompt import parse_seq, parse_seqs
        from ssdprof.checkpoint.names import check_layers
        from ssdprof.errors import BadInputError
        from ssdprof.jobs.request import CaptureRequest, ModelRequest, PromptRequest

        if self.prompt_file is not None and self.prompt == "random":
            raise BadInputError("--prompt random and --prompt-file cannot be combined.", "Give one of them.")
        check_layers(self.layers)
        return CaptureRequest(
            model=ModelRequest(model=self.model, revision=self.revision, tokenizer=self.tokenizer),
            prompt=PromptRequest(
                text=self.prompt_file or self.prompt, seqlens=None if self.seq is None else parse_seqs(self.seq)
            ),
            layers=self.layers,
            segment_length=None if self.segment is None else parse_seq(self.segment),
        )


@dataclass(frozen=True, kw_only=True)
class PlacedModelOptions(ModelOptions):
    """Model options, and where the weights are."""

    placement: Annotated[
        Literal["one-gpu", "all-gpus", "cpu-offload", "disk-offload"] | None,
        typer.Option(
            help="Where the weights are: on one GPU, on all visible GPUs, or partly in main memory or on the disk.",
            show_default="the fastest that fits",
        ),
    ] = None

    def request(self) -> CaptureRequest:
        return replace(super().request(), placement=self.placement)


@dataclass(frozen=True, kw_only=True)
class ServedModelOptions(PlacedModelOptions):
    """Model options, and how a server would run the prompt."""

    batch: Annotated[
        int,
        typer.Option(metavar="N", min=1, max=65536, help="Run N different prompts side by side.", show_default=True),
    ] = 1
    packed: Annotated[
        str | None,
        typer.Option(
            metavar="NxA-B",
            help="Run N sequences of A to B tokens, packed into one call: 64x1k-4k.",
            show_default=False,
        ),
    ] = None
    chunked_prefill: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Replay the prompt in chunks of N tokens, each with the states that the previous one left: 8k.",
            show_default=False,
        ),
    ] = None
    decode: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, max=4096, help="Let the model generate N tokens after the prompt, and replay each step."
        ),
    ] = 0

    def request(self) -> CaptureRequest:
        from ssdprof.jobs.request import parse_serving

        serving = parse_serving(
            self.batch, self.packed, self.chunked_prefill, self.decode, seq=self.seq, segment=self.segment
        )
        request = super().request()
        return replace(request, prompt=replace(request.prompt, serving=serving))
