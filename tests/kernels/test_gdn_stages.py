"""Each unfused GDN stage against its formula, chunk after chunk, on the results of the formulas before it.

A formula is evaluated twice: `hi` in fp64, and `lo` in fp32 with the roundings that the stage's precision has.  The
stage passes if max|ours - hi| <= 2 * (max|lo - hi| + eps * max|hi|), eps of the stage's output dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import gdn_stages as oracle
import pytest
import torch
from gdn_cases import EXACT, RELAXED, Case
from gdn_stages import of_chunk, workspace
from stage_formulas import Arithmetic, Chunk, Formula, assert_within, chunks_of

from ssdprof.kernels.chunks import Chunks
from ssdprof.kernels.gdn.config import operand_dtype
from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.gdn.unfused.l2norm import qk_l2norm
from ssdprof.kernels.gdn.unfused.stages import (
    chunk_output,
    chunk_state,
    gate_cumsum,
    recompute_w_u,
    scaled_dot_kkt,
    solve_tril,
)  # fmt: skip
from ssdprof.kernels.precision import Precision

BATCH = Case(batch=2, length=75, key_heads=2, values_per_key=2, key_dim=20, value_dim=24, l2norm=False, chunk_size=32)
PACKED = Case(lengths=(0, 65, 1, 0, 70), key_dim=40, value_dim=17, initial_state=True, l2norm=False)
CASES = pytest.mark.parametrize("case", [BATCH, PACKED], ids=["batch", "packed"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
PRECISIONS = pytest.mark.parametrize("precision", [EXACT, RELAXED], ids=["exact", "relaxed"])


def assert_stage(ours: torch.Tensor, formula: Formula, inputs: GDNInputs, precision: Precision = EXACT) -> None:
    dtype = inputs.q.dtype
    operand = operand_dtype(dtype, precision)
    assert_within(ours, formula, Arithmetic(torch.float32, operand, precision.intermediate_dtype(dtype)))


@dataclass(frozen=True)
class Stages:
    """A call's chunks, and the results that stages pass on, with no rounding except of these results."""

    inputs: GDNInputs
    chunks: list[Chunk]
    heads: int
    operand: torch.dtype

    @classmethod
    def of(cls, inputs: GDNInputs, precision: Precision = EXACT) -> Stages:
        return cls(inputs, chunks_of(inputs), inputs.v.shape[2], operand_dtype(inputs.q.dtype, precision))

    def piece(self, name: str, chunk: Chunk) -> torch.Tensor:
        return of_chunk(getattr(self.inputs, name), chunk, self.inputs.chunk_size, self.heads)

    def pieces(self) -> list[dict[str, torch.Tensor]]:
        """The stages' results for every chunk, in the dtypes in which they are stored."""
        inputs, results = self.inputs, []
        S = torch.zeros(self.heads, inputs.v.shape[3], inputs.q.shape[3], dtype=torch.float64)
        for chunk in self.chunks:
            if chunk.first:
                S = torch.zeros_like(S)
                if inputs.initial_state is not None:
                    S = inputs.initial_state[chunk.sequence].double().mT
            k, v, beta, g = (self.piece(name, chunk) for name in ("k", "v", "beta", "g"))
            g_cumsum = oracle.gate_cumsum(g)
            L = oracle.scaled_dot_kkt(k, beta, g_cumsum).float()
            A = oracle.solve_tril(L).to(self.operand)
            w, u = (tensor.to(self.operand) for tensor in oracle.recompute_w_u(A, k, v, beta, g_cumsum))
            v_new, after = oracle.chunk_state(k, w, u, g_cumsum, S)
            results.append(
                dict(g_cumsum_log2=(g_cumsum / math.log(2)).float(), L=L, A=A, w=w, u=u, entering=S)
                | dict(S=S.to(self.operand), v_new=v_new.to(self.operand), after=after)
            )
            S = after
        return results

    def workspace(self, pieces: list[dict[str, torch.Tensor]], name: str) -> torch.Tensor:
        slots = (self.inputs.q.shape[0], Chunks.of(self.inputs).count)
        return workspace([piece[name] for piece in pieces], self.chunks, slots)


def g_of(piece: dict[str, torch.Tensor]) -> torch.Tensor:
    return piece["g_cumsum_log2"].double() * math.log(2)


@CASES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_gate_cumsum(case: Case, dtype: torch.dtype) -> None:
    g = case.inputs().g.to(dtype)
    g[:, 5], g[:, 11], g[:, 40] = 0.5, -torch.inf, -1e30
    inputs = case.inputs(g=g)
    ours = gate_cumsum(inputs.g, Chunks.of(inputs))
    for chunk in chunks_of(inputs):
        piece = of_chunk(inputs.g, chunk, inputs.chunk_size, inputs.g.shape[2])
        expected = (piece / math.log(2)).clamp(-160, 0).cumsum(-1)
        torch.testing.assert_close(ours[chunk.b, chunk.c].double(), expected, rtol=2**-22, atol=1e-6)


@DTYPES
@pytest.mark.parametrize("key_dim", [1, 16, 60, 100])
def test_qk_l2norm(dtype: torch.dtype, key_dim: int) -> None:
    inputs = Case(batch=2, length=9, key_heads=3, key_dim=key_dim, dtype=dtype).inputs()
    strided = inputs.q.transpose(1, 2).contiguous().transpose(1, 2)
    assert_stage(qk_l2norm(strided, dtype=dtype), lambda a: oracle.qk_l2norm(inputs.q, a), inputs)


@CASES
@DTYPES
@PRECISIONS
def test_scaled_dot_kkt(case: Case, dtype: torch.dtype, precision: Precision) -> None:
    stages = Stages.of(case.but(dtype=dtype).inputs(), precision)
    inputs, pieces = stages.inputs, stages.pieces()
    ours = scaled_dot_kkt(
        inputs.k, inputs.beta, stages.workspace(pieces, "g_cumsum_log2"), Chunks.of(inputs), operand=stages.operand
    )
    for chunk, piece in zip(stages.chunks, pieces, strict=True):
        k, beta, g_cumsum = stages.piece("k", chunk), stages.piece("beta", chunk), g_of(piece)
        # blocks above the diagonal are not written
        written = ours[chunk.b, chunk.c].nan_to_num(0.0)
        assert_stage(written, lambda a, k=k, b=beta, g=g_cumsum: oracle.scaled_dot_kkt(k, b, g, a), inputs, precision)


@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("kind", ["random", "collinear", "beta 2"])
def test_solve_tril(size: int, kind: str) -> None:
    """Near-collinear keys and beta near 2: entries of the inverse stay small where powers of L are huge."""
    case = Case(length=size, key_dim=16, l2norm=False, chunk_size=size, gate=0.0)
    changes = {"random": {}, "collinear": dict(collinear=0.99), "beta 2": dict(collinear=0.99, largest_beta=2.0)}[kind]
    inputs = case.but(**changes).inputs()
    stages = Stages.of(inputs)
    L = stages.workspace(stages.pieces(), "L")
    above = torch.ones(size // 16, size // 16).triu(1).repeat_interleave(16, 0).repeat_interleave(16, 1) > 0
    ours = solve_tril(L.masked_fill(above, torch.nan), size, Chunks.of(inputs), operand=torch.float32)
    exact = oracle.solve_tril(L.double())
    assert (ours - exact).abs().max() < 2e-6 * exact.abs().max()
    assert torch.equal(ours.triu(1), torch.zeros_like(ours))


@CASES
@DTYPES
@PRECISIONS
def test_recompute_w_u(case: Case, dtype: torch.dtype, precision: Precision) -> None:
    stages = Stages.of(case.but(dtype=dtype).inputs(), precision)
    inputs, pieces = stages.inputs, stages.pieces()
    w, u = recompute_w_u(
        stages.workspace(pieces, "A"), inputs.k, inputs.v, inputs.beta, stages.workspace(pieces, "g_cumsum_log2"),
        Chunks.of(inputs), precision=precision,
    )  # fmt: skip
    for chunk, piece in zip(stages.chunks, pieces, strict=True):
        k, v, beta = (stages.piece(name, chunk) for name in ("k", "v", "beta"))
        given: tuple[Any, ...] = (piece["A"], k, v, beta, g_of(piece))
        assert_stage(w[chunk.b, chunk.c], lambda a, x=given: oracle.recompute_w_u(*x, a=a)[0], inputs, precision)
        assert_stage(u[chunk.b, chunk.c], lambda a, x=given: oracle.recompute_w_u(*x, a=a)[1], inputs, precision)


@CASES
@DTYPES
@PRECISIONS
def test_chunk_state(case: Case, dtype: torch.dtype, precision: Precision) -> None:
    stages = Stages.of(case.but(dtype=dtype).inputs(), precision)
    inputs, pieces = stages.inputs, stages.pieces()
    w, u, g = (stages.workspace(pieces, name) for name in ("w", "u", "g_cumsum_log2"))
    prev_states, v_new, final_states = chunk_state(
        inputs.k, w, u, g, Chunks.of(inputs),
        inputs_dtype=dtype, precision=precision, initial_state=inputs.initial_state,
    )  # fmt: skip
    rounding = 8 * torch.finfo(stages.operand).eps  # of every chunk's operands, from the start of the sequence
    for chunk, piece in zip(stages.chunks, pieces, strict=True):
        for ours, name in ((prev_states[chunk.b, chunk.c], "entering"), (v_new[chunk.b, chunk.c], "v_new")):
            hi = piece[name].double()
            assert torch.isfinite(ours).all()
            assert (ours.double() - hi).abs().max() <= rounding * (1 + hi.abs().max())
        if chunk.last:
            assert (final_states[chunk.sequence].mT - piece["after"]).abs().max() <= rounding * 8
    if inputs.initial_state is not None:
        assert torch.equal(final_states[0], inputs.initial_state[0]), "an empty sequence ends as it begins"


@CASES
@DTYPES
@PRECISIONS
def test_chunk_output(case: Case, dtype: torch.dtype, precision: Precision) -> None:
    stages = Stages.of(case.but(dtype=dtype).inputs(), precision)
    inputs, pieces = stages.inputs, stages.pieces()
    S, v_new, g = (stages.workspace(pieces, name) for name in ("S", "v_new", "g_cumsum_log2"))
    out = chunk_output(
        inputs.q, inputs.k, S, v_new, g, Chunks.of(inputs), scale=0.3, out_dtype=dtype, precision=precision
    )
    for chunk, piece in zip(stages.chunks, pieces, strict=True):
        q, k = stages.piece("q", chunk), stages.piece("k", chunk)
        given = (q, k, piece["S"], piece["v_new"], g_of(piece), 0.3)
        ours = out[chunk.b, chunk.start : chunk.stop].transpose(0, 1)

        def formula(a: Arithmetic, given: tuple[Any, ...] = given, n: int = ours.shape[1]) -> torch.Tensor:
            return oracle.chunk_output(*given, a=a)[:, :n]

        assert_stage(ours, formula, inputs, precision)
