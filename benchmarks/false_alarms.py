"""Count the correct outputs that fail: of random calls, half of them with heads that hardly forget.

    python benchmarks/false_alarms.py [--runs 40] [--tokens 32768]

Each run has another seed; operators, precisions and kernels take turns.  On a GPU the outputs are
those of `fused` and `unfused` at a model's sizes.  Without one they are of the rounded form, in
chunks of the oracle's length, a half and a quarter of it; 4,096 tokens then take 15 seconds a run.
"""

import argparse
from dataclasses import replace
from typing import Any

import torch

from ssdprof import kernels, operators
from ssdprof.kernels.oracle import spans_of
from ssdprof.kernels.precision import Precision
from ssdprof.measure.accuracy import Candidate, compare
from ssdprof.operators import generate

SIZES = {"ssd": "2x64x128x1", "gdn": "2/2x128x128", "kda": "2/2x128x128"}  # without a GPU
GATES = {"ssd": "A", "gdn": "g", "kda": "g"}


def generated(name: str, tokens: int, seed: int, slow: bool, device: torch.device) -> Any:
    """Random inputs; in every fourth head gates are 1e-6 to 1e-2 of what they were."""
    generate.SEED = seed
    generated = operators.get(name).generated
    shape = next(iter(generated.shapes.values()))
    if device.type == "cpu":
        shape = generated.parse(SIZES[name]) or shape
    cell = generate.Cell(
        shape=shape,
        dtype="bf16",
        layout="views",
        tokens=generate.Tokens(sequences=1, seqlen=tokens),
    )
    inputs = generated.draw(cell, device)
    if not slow:
        return inputs
    gate = getattr(inputs, GATES[name]).clone()
    heads = gate if name == "ssd" else gate.transpose(0, 2)
    heads[::4] *= 10.0 ** -(
        2 + 4 * torch.rand(1, generator=torch.Generator().manual_seed(seed)).item()
    )
    return replace(inputs, **{GATES[name]: gate})


def output(inputs: Any, precision: Precision, turn: int) -> Any:
    if inputs.device.type == "cuda":
        return kernels.get(inputs.operator, ("fused", "unfused")[turn % 2]).run(inputs, precision)
    oracle = operators.get(inputs.operator).oracle
    chunks = (oracle.chunk_size(inputs), *oracle.shorter_chunks(inputs))
    (span,) = spans_of(inputs)
    gate = oracle.gate(inputs, span, chunks[turn % len(chunks)])
    out, states = oracle.rounded(inputs, precision).advance(inputs, span, gate)
    return out[None], states[None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=32768)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precisions = (
        Precision(),
        Precision(intermediates="relaxed", state_dtype=torch.bfloat16),
        Precision(intermediates="exact", state_dtype=torch.bfloat16),
    )
    alarms = 0
    for run in range(arguments.runs):
        for name in SIZES:
            inputs = generated(name, arguments.tokens, run, run % 2 == 1, device)
            found = {}
            for turn, precision in enumerate(precisions):
                result = output(inputs, precision, run // 2 + turn)
                found[str(precision)] = Candidate(output=result, precision=precision)
            for precision_name, tensors in compare(inputs, found).items():
                for tensor in tensors:
                    alarms += bool(tensor.reason)
                    if tensor.reason:
                        print(f"run {run}, {name}, {precision_name}: {tensor.reason}", flush=True)
    outputs = arguments.runs * len(SIZES) * len(precisions)
    print(f"{alarms} alarms in {outputs} outputs, half of them with slow heads")


if __name__ == "__main__":
    main()
