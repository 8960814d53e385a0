"""Notes for the reader of a run's report, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ssdprof.core.subject import DECODED_ON_LOAD, Cast, CheckpointRef, Placement, Prompt


def notes(ref: CheckpointRef, prompts: Sequence[Prompt]) -> tuple[str, ...]:
    """Notes on the checkpoint and the prompts.  `report.caveats` adds those that follow from the results."""
    return (*_of_checkpoint(ref), *_of_prompts(ref, prompts))


def of_absent(reasons: Sequence[str]) -> tuple[str, ...]:
    """One note on the requested implementations that are unavailable.  reasons: a sentence for each."""
    return (f"Not compared: {'; '.join(reason.rstrip('.') for reason in reasons)}.",) if reasons else ()


def of_ranks(ranks: int) -> tuple[str, ...]:
    """The note if the heads were divided among tensor-parallel ranks."""
    if ranks == 1:
        return ()
    return (
        f"What was replayed is the share of the first of {ranks} tensor-parallel ranks: its heads alone, with their "
        "groups or key heads; a single group is on every rank.  The model itself ran undivided.",
    )


def of_placement(placement: Placement | None) -> tuple[str, ...]:
    """The note if the weights were not all on one device."""
    if placement is None or placement.kind == "one-gpu":
        return ()
    if placement.kind == "all-gpus":
        how = "were divided among the GPUs"
    else:
        where = " and ".join(
            f"{held.layers} from {'main memory' if held.place == 'cpu' else 'the disk'}"
            for held in placement.held
            if held.place in ("cpu", "disk") and held.place != placement.device
        )
        how = f"were brought to {placement.device} layer by layer ({where})" if where else f"fit on {placement.device}"
    return (f"Placement {placement.kind}: the model's weights {how}; layers were replayed on {placement.device}.",)


def of_cast(cast: Cast | None) -> tuple[str, ...]:
    """The note if the inputs were replayed in another dtype than the model's."""
    if cast is None:
        return ()
    return (
        f"The captured inputs were {cast}: times, matches and errors are those of {cast.to} inputs, and the model "
        f"itself ran in {cast.source}.  Parameters, states and gates that the model keeps in fp32 were not cast.",
    )


def _of_checkpoint(ref: CheckpointRef) -> Iterator[str]:
    if ref.siblings:
        yield (
            f"{ref.requested} is a family of models; {ref.repo_id} was taken.  Its siblings: {', '.join(ref.siblings)}."
        )
    if ref.random_weights:
        yield (
            "The weights are random: good for speed, which depends on shapes, but the accuracy says little about any "
            "trained model, and the model's answers mean nothing."
        )
    if ref.quantization is not None:
        decoded = " and was decoded to 16 bit as it was loaded" if ref.quantization in DECODED_ON_LOAD else ""
        yield (
            f"The checkpoint is quantised ({ref.quantization}){decoded}: the error of its projections is part of the "
            "values that were replayed."
        )


def _of_prompts(ref: CheckpointRef, prompts: Sequence[Prompt]) -> Iterator[str]:
    longest = max(max(one.serving.packed, default=one.seqlen) + one.serving.decode for one in prompts)
    if ref.trained_context is not None and longest > ref.trained_context:
        yield (
            f"The model was trained on {ref.trained_context:,} tokens and ran on {longest:,}: its activations beyond "
            "that may be unlike those in use."
        )
    if any(prompt.kind == "random" for prompt in prompts):
        yield (
            "The prompt is random tokens: good for speed, but no text has such statistics, so decays, states and "
            "accuracy may be unlike those in use."
        )
