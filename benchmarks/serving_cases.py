"""States that servers keep: after every drafted token, and every N tokens of a prompt.  Gated DeltaNet, on one GPU.

    PYTHONPATH=. python benchmarks/serving_cases.py [--out FILE] [--check]

verify       T drafted tokens of each sequence, with the state after each: `gdn_recurrent(every_state=True)`, T single
             steps of it, and FlashInfer's gated_delta_rule_mtp with its buffer of intermediate states
checkpoints  a prompt with the state every N tokens: our fused kernel, called for N tokens after the other, and
             FlashInfer's prefill with checkpoint_every_n_tokens

Each kept state is first compared with the fp64 oracle of a run that is cut there, then all are timed in turns, with a
cold L2.  FlashInfer's pools, gates and transposed states are prepared outside of its time.  A line of JSON for each.
--check compares small cases and times nothing; on a machine without a GPU ours run in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module

import torch

from ssdprof import kernels
from ssdprof.core import statistics
from ssdprof.kernels.gdn.recurrent import gdn_recurrent
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan
from ssdprof.measure.accuracy import Candidate, compare
from ssdprof.measure.first_run import Call
from ssdprof.measure.sampling import SamplingPlan
from ssdprof.measure.timing import CudaTimer, device_times
from ssdprof.operators import get
from ssdprof.operators.generate import Cell, Tokens

Inputs = kernels.GDNInputs
Kept = tuple[torch.Tensor, torch.Tensor]  # out (B, T, HV, V), states (B, T / every, HV, K, V)
Run = Callable[[Inputs], Kept]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLAN = SamplingPlan(min_recordings=3, max_recordings=5, seconds=4)


def drawn(heads: str, batch: int, length: int) -> Inputs:
    """Inputs as models have them, in bf16, with initial states."""
    generator = get("gdn").generated
    shape = generator.parse(heads)
    assert shape
    cell = Cell(shape=shape, tokens=Tokens(sequences=batch, seqlen=length), dtype="bf16", layout="contiguous")
    inputs = generator.draw(cell, DEVICE)
    sizes = inputs.states_shape
    return replace(inputs, initial_state=0.1 * torch.randn(sizes, device=DEVICE))


def part(inputs: Inputs, start: int, stop: int, state: torch.Tensor | None) -> Inputs:
    """Positions start..stop of every sequence, after `state`."""
    given = {name: getattr(inputs, name)[:, start:stop] for name in ("q", "k", "v", "g", "beta")}
    return replace(inputs, initial_state=state, **given)


def cut_runs(inputs: Inputs, every: int) -> Inputs:
    """Each sequence up to every kept state, as packed sequences of their own."""
    batch, length = inputs.v.shape[:2]
    lengths = list(range(every, length + 1, every))
    given = {
        name: torch.cat([getattr(inputs, name)[row, :stop] for row in range(batch) for stop in lengths])[None]
        for name in ("q", "k", "v", "g", "beta")
    }
    bounds = torch.tensor([0, *lengths] + lengths * (batch - 1), device=DEVICE).cumsum(0, dtype=torch.int32)
    assert inputs.initial_state is not None
    return replace(
        inputs, initial_state=inputs.initial_state.repeat_interleave(len(lengths), 0), cu_seqlens=bounds, **given
    )


def fault(inputs: Inputs, every: int, kept: Kept) -> str:
    """Why an output or a kept state is not that of a run that is cut there; empty if all are."""
    out, states = kept
    lengths = range(every, out.shape[1] + 1, every)
    outs = torch.cat([out[row, :stop] for row in range(len(out)) for stop in lengths])[None]
    output = (outs.contiguous(), states.flatten(0, 1).float().contiguous())
    found = compare(cut_runs(inputs, every), {"it": Candidate(output=output, precision=Precision())})["it"]
    return "; ".join(one.reason for one in found if one.reason)


# --- implementations


def every_state(inputs: Inputs) -> Kept:
    return gdn_recurrent(inputs, every_state=True)


def one_after_the_other(run: Callable[[Inputs], Kept], every: int, inputs: Inputs) -> Kept:
    """Calls for `every` tokens, each with the state of the one before."""
    outs, states, state = [], [], inputs.initial_state
    for start in range(0, inputs.length, every):
        out, state = run(part(inputs, start, min(start + every, inputs.length), state))
        outs.append(out)
        states.append(state)
    return torch.cat(outs, 1), torch.stack(states, 1)


def fused(inputs: Inputs) -> Kept:
    out, states = kernels.get("gdn", "fused").run(inputs, Precision())
    return out, states


def flashinfer_mtp(inputs: Inputs) -> Run:
    """FlashInfer's kernel for drafted tokens with its arguments prepared.  Keeps states with V first."""
    function = import_module("flashinfer.gdn_decode").gated_delta_rule_mtp
    assert inputs.initial_state is not None
    (batch, length, heads, width), keys = inputs.v.shape, inputs.q.shape[3]
    slots, zeros = torch.arange(batch, dtype=torch.int32, device=DEVICE), torch.zeros(heads, device=DEVICE)
    pool = inputs.initial_state.mT.contiguous()
    a, b = inputs.g.double().neg().expm1().log().float(), inputs.beta.double().logit().float()
    buffer = torch.empty(batch, length, heads, width, keys, device=DEVICE)
    out = torch.empty_like(inputs.v)

    def run(_: Inputs) -> Kept:
        function(
            inputs.q, inputs.k, inputs.v, pool, slots, zeros, a, zeros, b, scale=inputs.scale_or_default, output=out,
            intermediate_states_buffer=buffer, disable_state_update=True, use_qk_l2norm=inputs.use_qk_l2norm,
        )  # fmt: skip
        return out, buffer.mT

    return run


def flashinfer_checkpoints(every: int, inputs: Inputs) -> Run:
    function = import_module("flashinfer.gdn_prefill").chunk_gated_delta_rule
    assert inputs.initial_state is not None
    batch, length, heads, width = inputs.v.shape
    count = length // every
    starts = torch.arange(batch + 1, device=DEVICE) * count
    kept = torch.empty(batch * count, heads, width, inputs.q.shape[3], device=DEVICE)
    q, k, v, g, beta = (getattr(inputs, name).flatten(0, 1) for name in ("q", "k", "v", "g", "beta"))
    states, decay = inputs.initial_state.mT.contiguous(), g.float().exp()
    bounds = torch.arange(batch + 1, device=DEVICE) * length

    def run(_: Inputs) -> Kept:
        out, _ = function(
            q, k, v, decay, beta.float(), initial_state=states, output_final_state=True, cu_seqlens=bounds,
            use_qk_l2norm_in_kernel=inputs.use_qk_l2norm, state_checkpoints=kept, checkpoint_cu_starts=starts,
            checkpoint_every_n_tokens=every,
        )  # fmt: skip
        return out.view(inputs.v.shape), kept.view(batch, count, heads, width, -1).mT

    return run


# --- cases


def cases(*, small: bool) -> Iterator[tuple[str, str, int, int, int]]:
    """(kind, heads, sequences, tokens, every)"""
    shapes = ("1/2x32x32",) if small else ("16/32x128x128", "2/8x128x128")
    for heads in shapes:
        for batch in (1, 3) if small else (1, 16, 64, 256):
            for length in (2, 3, 8) if small else (2, 4, 8):
                yield "verify", heads, batch, length, 1
        for batch, length in ((1, 192),) if small else ((1, 16384), (8, 4096)):
            for every in (64,) if small else (64, 512, 2048):
                yield "checkpoints", heads, batch, length, every


def runs_of(kind: str, inputs: Inputs, every: int) -> Iterator[tuple[str, Run]]:
    """Ours first; those of FlashInfer that can be imported."""
    if kind == "verify":
        yield "recurrent, every state", every_state
        yield "recurrent, single steps", partial(one_after_the_other, gdn_recurrent, 1)
        library: Callable[[Inputs], Run] = flashinfer_mtp
    else:
        yield "fused, cut", partial(one_after_the_other, fused, every)
        library = partial(flashinfer_checkpoints, every)
    try:
        yield "flashinfer", library(inputs)
    except (ImportError, RuntimeError) as error:
        print(f"no FlashInfer: {error}", file=sys.stderr)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(words)
    lines, wrong = [], 0
    for kind, heads, batch, length, every in cases(small=options.check):
        inputs = drawn(heads, batch, length)
        calls, line = {}, {"kind": kind, "heads": heads, "sequences": batch, "tokens": length, "every": every}
        for name, run in runs_of(kind, inputs, every):
            tested = length <= 4096 // every * 64 or options.check  # the cut runs of long prompts take too long
            try:
                why = fault(inputs, every, run(inputs)) if tested else ""
            except Exception as error:  # a library's refusals are of any class
                line[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                continue
            wrong += bool(why)
            line[name] = why or ("right" if tested else "not compared")
            one = Implementation(
                operator="gdn", name=name, run=lambda given, _precision, run=run: run(given),
                plan=lambda *_: Plan(variant="", launches=0),
            )  # fmt: skip
            calls[name] = [Call(implementation=one, inputs=inputs, precision=Precision(), label=name)]
        if not options.check:
            for name, samples in device_times(calls, CudaTimer(DEVICE), PLAN).items():
                line[f"{name}, us"] = round(statistics.median(samples).value, 2)
        print(json.dumps(line), flush=True)
        lines.append(json.dumps(line))
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            file.write("\n".join([torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU", *lines]) + "\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
