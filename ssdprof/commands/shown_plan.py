"""Prints the plan of --dry-run on stdout."""

from __future__ import annotations

from rich.text import Text

from ssdprof.commands import terminal
from ssdprof.core.words import size_words
from ssdprof.report.placement import placement_words
from ssdprof.report.serving import serving_words
from ssdprof.schema.plan import DryRun


def show_plan(plan: DryRun, as_json: bool) -> None:
    if as_json:
        terminal.print_json(plan.model_dump(mode="json"))
        return
    console = terminal.out()
    checkpoint = plan.checkpoint
    console.print(Text(f"{checkpoint.repo_id} {checkpoint.revision or ''}".rstrip(), style="bold"))
    for note in plan.notes:
        console.print(Text(f"  {note}"))
    indices = ", ".join(str(layer.index) for layer in plan.layers)
    rows = {
        "layers": f"{indices} ({plan.layers[0].operator.upper()}, {plan.dims}) of {checkpoint.layer_count}",
        "prompt": f"{_tokens(plan.seqlens)}",
        "served": serving_words(plan.serving, batch=plan.batch, tensor_parallel=plan.tensor_parallel),
        "download": size_words(plan.download_bytes),
        "weights": f"{size_words(plan.weight_bytes)} loaded; {size_words(plan.free_bytes)} are free on {plan.device}",
        "placement": placement_words(plan.placement) if plan.placement else "",
    }
    for name, value in rows.items():
        if value:
            console.print(Text(f"  {name:<10}{value}"))
    for file in plan.files:
        size = size_words(file.size_bytes)
        console.print(Text(f"  {size:>12}  {file.name}{'  (here)' if file.cached else ''}"))


def _tokens(seqlens: tuple[int, ...]) -> str:
    """ "1 token", "1,024, 16,384 tokens"."""
    return f"{', '.join(f'{seqlen:,}' for seqlen in seqlens)} {'token' if seqlens == (1,) else 'tokens'}"
