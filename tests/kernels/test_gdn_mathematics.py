"""Every numbered equation of docs/gdn-mathematics.md, unchanged, in fp64 against the recurrence.

One head of one sequence, as in the document.  Letters are those of the document.  A test that needs several stages
computes each from the one before, never from the reference's tensors.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.gdn.reference import gdn_recurrence

CHUNK = 16
LENGTH = 3 * CHUNK + 5  # the last chunk is short
TOLERANCE = {"rtol": 1e-10, "atol": 1e-11}


@dataclass
class Head:
    """One head of one sequence in fp64: q, k (T, K), v (T, V), g, beta (T), initial_state (K, V)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    initial_state: torch.Tensor
    scale: float

    def slice(self, start: int, stop: int) -> "Head":
        rows = slice(start, stop)
        return Head(
            self.q[rows], self.k[rows], self.v[rows], self.g[rows], self.beta[rows], self.initial_state, self.scale
        )


def drawn(
    seed: int = 0, length: int = LENGTH, *, beta_limit: float = 2.0, collinear: float = 0.0
) -> tuple[Head, GDNInputs]:
    """A head with normalised q and k, and GDNInputs of this head for which the kernel normalises them."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, length, 1, width, generator=generator) for width in (12, 12, 20))
    k = collinear * k[:, :1] + (1 - collinear) * k
    g = -torch.rand(1, length, 1, generator=generator).pow(4) * 5  # from hardly any decay to exp(-5)
    beta = beta_limit * torch.rand(1, length, 1, generator=generator)
    state = torch.randn(1, 1, 12, 20, generator=generator)
    inputs = GDNInputs(q=q, k=k, v=v, g=g, beta=beta, initial_state=state, use_qk_l2norm=True)
    normalised = [x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q.double(), k.double())]  # (1)
    q, k, v, g, beta = (x[0, :, 0].double() for x in (*normalised, v, g, beta))
    return Head(q, k, v, g, beta, state[0, 0].double(), 12**-0.5), inputs


# --- the equations of a chunk


def gate_cumsum(head: Head) -> torch.Tensor:
    return head.g.cumsum(0)  # (9)


def scaled_dot_kkt(head: Head, g_cumsum: torch.Tensor) -> torch.Tensor:
    decay = (g_cumsum[:, None] - g_cumsum[None]).clamp(max=0).exp()
    return (head.beta[:, None] * decay * (head.k @ head.k.T)).tril(-1)  # (10)


def solve_tril(L: torch.Tensor) -> torch.Tensor:
    A_inv = torch.zeros_like(L)
    for i in range(len(L)):
        A_inv[i, i] = 1
        A_inv[i] -= sum((L[i, j] * A_inv[j] for j in range(i)), torch.zeros_like(L[i]))  # (12)
    return A_inv


def recompute_w_u(head: Head, g_cumsum: torch.Tensor, A_inv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    w = A_inv @ ((head.beta * g_cumsum.exp())[:, None] * head.k)
    u = A_inv @ (head.beta[:, None] * head.v)
    return w, u  # (14)


def chunk_state(
    head: Head, g_cumsum: torch.Tensor, w: torch.Tensor, u: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    v_new = u - w @ state  # (15)
    to_end = (g_cumsum[-1] - g_cumsum).exp()
    return v_new, g_cumsum[-1].exp() * state + head.k.T @ (to_end[:, None] * v_new)  # (16)


def chunk_output(head: Head, g_cumsum: torch.Tensor, v_new: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    decay = (g_cumsum[:, None] - g_cumsum[None]).clamp(max=0).exp()
    scores = (head.q @ head.k.T * decay).tril()
    return head.scale * (g_cumsum.exp()[:, None] * (head.q @ state) + scores @ v_new)  # (17)


def stages(head: Head, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output of a chunk and the state after it, by the six stages."""
    g_cumsum = gate_cumsum(head)
    w, u = recompute_w_u(head, g_cumsum, solve_tril(scaled_dot_kkt(head, g_cumsum)))
    v_new, after = chunk_state(head, g_cumsum, w, u, state)
    return chunk_output(head, g_cumsum, v_new, state), after


def gate_free_inverse(head: Head) -> torch.Tensor:
    return solve_tril((head.beta[:, None] * (head.k @ head.k.T)).tril(-1))  # (18)


def x_and_w(head: Head, g_cumsum: torch.Tensor, A: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """X (C, K) and W (C, C) of the two-product form."""
    X = (head.beta * (g_cumsum[-1] - g_cumsum).exp())[:, None] * (A.T @ head.k)  # (21)
    decay = (g_cumsum[:, None] - g_cumsum[None]).clamp(max=0).exp()
    W = (head.beta[None] * decay * ((head.q @ head.k.T).tril() @ A)).tril()  # (22)
    return X, W


def two_products(head: Head, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output of a chunk and the state after it, by the fused kernel's form."""
    g_cumsum = gate_cumsum(head)
    X, W = x_and_w(head, g_cumsum, gate_free_inverse(head))
    Y = head.v - g_cumsum.exp()[:, None] * (head.k @ state)  # (20)
    after = g_cumsum[-1].exp() * state + X.T @ Y  # (23)
    return head.scale * (g_cumsum.exp()[:, None] * (head.q @ state) + W @ Y), after  # (24)


def over_chunks(head: Head, chunk) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[no-untyped-def]
    outputs, state = [], head.initial_state
    for start in range(0, len(head.g), CHUNK):
        o, state = chunk(head.slice(start, start + CHUNK), state)
        outputs.append(o)
    return torch.cat(outputs), state


def oracle(inputs: GDNInputs) -> tuple[torch.Tensor, torch.Tensor]:
    o, state = gdn_recurrence(inputs)
    return o[0, :, 0], state[0, 0]


# --- the recurrence


def test_recurrence() -> None:
    """(2) to (4), and (5): one matrix that forgets, erases and writes."""
    head, inputs = drawn()
    expected, final = oracle(inputs)
    state = other = head.initial_state
    for t in range(LENGTH):
        k = head.k[t]
        v_new = head.beta[t] * (head.v[t] - head.g[t].exp() * state.T @ k)
        state = head.g[t].exp() * state + torch.outer(k, v_new)
        torch.testing.assert_close(head.scale * state.T @ head.q[t], expected[t], **TOLERANCE)
        erase = torch.eye(12, dtype=torch.float64) - head.beta[t] * torch.outer(k, k)
        other = head.g[t].exp() * erase @ other + head.beta[t] * torch.outer(k, head.v[t])
    torch.testing.assert_close(state, final, **TOLERANCE)
    torch.testing.assert_close(other, final, **TOLERANCE)


def test_a_transition_never_grows_the_state() -> None:
    """(5) with unit keys and beta from 0 to 2: the transition's norm is at most exp(g)."""
    head, _ = drawn(beta_limit=2.0)
    for k, beta in zip(head.k, head.beta, strict=True):
        transition = torch.eye(12, dtype=torch.float64) - beta * torch.outer(k, k)
        assert torch.linalg.matrix_norm(transition, 2) <= 1 + 1e-12


def test_unrolled() -> None:
    """(6) to (8), with the corrected values of the recurrence."""
    head, inputs = drawn()
    expected, final = oracle(inputs)
    G = head.g.cumsum(0)
    decay = (G[:, None] - G[None]).clamp(max=0).exp()
    S0 = head.initial_state
    v_new = torch.zeros_like(head.v)
    for t in range(LENGTH):
        seen = (decay[t, :t, None] * (head.k[:t] @ head.k[t])[:, None] * v_new[:t]).sum(0)
        v_new[t] = head.beta[t] * (head.v[t] - G[t].exp() * S0.T @ head.k[t] - seen)  # (8)
    torch.testing.assert_close(G[-1].exp() * S0 + head.k.T @ (decay[-1, :, None] * v_new), final, **TOLERANCE)  # (6)
    scores = (head.q @ head.k.T * decay).tril()
    o = head.scale * (G.exp()[:, None] * (head.q @ S0) + scores @ v_new)  # (7)
    torch.testing.assert_close(o, expected, **TOLERANCE)


# --- the stages


def test_the_system_of_a_chunk() -> None:
    """(11): the corrected values of a chunk solve a unit lower triangular system."""
    head, _ = drawn(length=CHUNK)
    g_cumsum = gate_cumsum(head)
    L = scaled_dot_kkt(head, g_cumsum)
    w, u = recompute_w_u(head, g_cumsum, solve_tril(L))
    v_new, _ = chunk_state(head, g_cumsum, w, u, head.initial_state)
    right = head.beta[:, None] * (head.v - g_cumsum.exp()[:, None] * (head.k @ head.initial_state))
    torch.testing.assert_close(v_new + L @ v_new, right, **TOLERANCE)


def test_the_inverse_by_rows_and_by_blocks() -> None:
    """(12), (13) and (13a)."""
    head, _ = drawn(length=CHUNK, collinear=0.9)
    L = scaled_dot_kkt(head, gate_cumsum(head))
    identity = torch.eye(CHUNK, dtype=torch.float64)
    inverse = solve_tril(L)
    torch.testing.assert_close(inverse @ (identity + L), identity, **TOLERANCE)
    half = CHUNK // 2
    top, bottom = solve_tril(L[:half, :half]), solve_tril(L[half:, half:])
    torch.testing.assert_close(inverse[half:, :half], -bottom @ L[half:, :half] @ top, **TOLERANCE)
    doubled, i = identity, torch.arange(CHUNK)
    for rows in (1, 2, 4, 8):
        of_pair, half_of_pair = i // (2 * rows), i // rows
        between = (of_pair[:, None] == of_pair[None]) & (half_of_pair[:, None] > half_of_pair[None])
        doubled = doubled - doubled @ (L * between) @ doubled
    torch.testing.assert_close(doubled, inverse, **TOLERANCE)


@pytest.mark.parametrize("form", [stages, two_products])
@pytest.mark.parametrize("collinear", [0.0, 0.99])
def test_chunked(form, collinear: float) -> None:  # type: ignore[no-untyped-def]
    """(9) to (17), and (18) to (24), chunk after chunk."""
    head, inputs = drawn(collinear=collinear)
    o, state = over_chunks(head, form)
    expected, final = oracle(inputs)
    torch.testing.assert_close(o, expected, **TOLERANCE)
    torch.testing.assert_close(state, final, **TOLERANCE)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), length=st.integers(1, 40), collinear=st.floats(0, 0.999))
def test_both_forms_are_the_recurrence(seed: int, length: int, collinear: float) -> None:
    head, inputs = drawn(seed, length, collinear=collinear)
    expected, final = oracle(inputs)
    for form in (stages, two_products):
        o, state = over_chunks(head, form)
        torch.testing.assert_close(o, expected, rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(state, final, rtol=1e-8, atol=1e-9)


def test_padding_neither_decays_nor_adds() -> None:
    """A position with g = 0 and beta = 0 leaves the state as it is."""
    head, _ = drawn(length=CHUNK)
    padded = Head(head.q, head.k, head.v, head.g.clone(), head.beta.clone(), head.initial_state, head.scale)
    padded.g[10:], padded.beta[10:] = 0, 0
    for form in (stages, two_products):
        o, state = form(padded, head.initial_state)
        expected, final = form(head.slice(0, 10), head.initial_state)
        torch.testing.assert_close(o[:10], expected, **TOLERANCE)
        torch.testing.assert_close(state, final, **TOLERANCE)


# --- the fused form's parts


def test_the_gate_leaves_the_inverse() -> None:
    """(19): the inverse with gates is the gate-free one times a decay, element by element."""
    head, _ = drawn(length=CHUNK)
    g_cumsum = gate_cumsum(head)
    decay = (g_cumsum[:, None] - g_cumsum[None]).clamp(max=0).exp()
    gated = solve_tril(scaled_dot_kkt(head, g_cumsum))
    torch.testing.assert_close(gate_free_inverse(head) * decay, gated, **TOLERANCE)


def test_what_x_and_w_stand_for() -> None:
    """X and W replace the inverse and its factors."""
    head, _ = drawn(length=CHUNK)
    g_cumsum = gate_cumsum(head)
    A_inv = solve_tril(scaled_dot_kkt(head, g_cumsum))
    X, W = x_and_w(head, g_cumsum, gate_free_inverse(head))
    to_end = (g_cumsum[-1] - g_cumsum).exp()
    torch.testing.assert_close(X.T, head.k.T @ (to_end[:, None] * A_inv * head.beta), **TOLERANCE)
    decay = (g_cumsum[:, None] - g_cumsum[None]).clamp(max=0).exp()
    torch.testing.assert_close(W, (head.q @ head.k.T * decay).tril() @ (A_inv * head.beta), **TOLERANCE)


def test_folded_norms() -> None:
    """(25): raw q and k in every product, and the norms' inverses as factors of rows."""
    head, inputs = drawn(length=CHUNK)
    k, q = inputs.k[0, :, 0].double(), inputs.q[0, :, 0].double()
    e, a = ((x.square().sum(-1) + 1e-6).rsqrt() for x in (k, q))
    g_cumsum, S = gate_cumsum(head), head.initial_state
    A = solve_tril((head.beta[:, None] * e[:, None] * e[None] * (k @ k.T)).tril(-1))
    A_e = e[:, None] * A
    decay = (g_cumsum[:, None] - g_cumsum[None]).clamp(max=0).exp()
    Y = head.v - (g_cumsum.exp() * e)[:, None] * (k @ S)
    X = (head.beta * (g_cumsum[-1] - g_cumsum).exp())[:, None] * (A_e.T @ k)
    W = (head.beta[None] * decay * ((q @ k.T).tril() @ A_e)).tril()
    o = (head.scale * a)[:, None] * (g_cumsum.exp()[:, None] * (q @ S) + W @ Y)
    expected, final = oracle(inputs)
    torch.testing.assert_close(o, expected, **TOLERANCE)
    torch.testing.assert_close(g_cumsum[-1].exp() * S + X.T @ Y, final, **TOLERANCE)


def test_a_stretch_maps_the_state_affinely() -> None:
    """(26) to (28): the matrix and the offset of a stretch of chunks, and the bound of the matrix."""
    head, inputs = drawn()
    M = torch.eye(12, dtype=torch.float64)
    N = torch.zeros_like(head.initial_state)
    for start in range(0, LENGTH, CHUNK):
        piece = head.slice(start, start + CHUNK)
        g_cumsum = gate_cumsum(piece)
        X, _ = x_and_w(piece, g_cumsum, gate_free_inverse(piece))
        M_c = g_cumsum[-1].exp() * torch.eye(12, dtype=torch.float64) - X.T @ (g_cumsum.exp()[:, None] * piece.k)
        M, N = M_c @ M, M_c @ N + X.T @ piece.v
    _, final = oracle(inputs)
    torch.testing.assert_close(M @ head.initial_state + N, final, **TOLERANCE)
    assert torch.linalg.matrix_norm(M, 2) <= head.g.sum().exp() * (1 + 1e-12)


# --- the inverse


@pytest.mark.parametrize("collinear", [0.0, 0.9, 0.999])
def test_entries_of_the_inverse_are_bounded(collinear: float) -> None:
    """(29) and its consequence: no entry exceeds beta, even if the keys are similar."""
    head, _ = drawn(length=CHUNK, collinear=collinear)
    A = gate_free_inverse(head)
    for j in range(CHUNK):
        written = head.k[j]
        for i in range(j + 1, CHUNK):
            torch.testing.assert_close(A[i, j], -head.beta[i] * (head.k[i] @ written), **TOLERANCE)
            written = written - head.beta[i] * head.k[i] * (head.k[i] @ written)
    below = A.tril(-1).abs().amax(1)
    assert (below <= head.beta * (1 + 1e-9)).all()


def test_powers_of_the_system_are_not() -> None:
    """(30): equal keys and beta = 1 in a chunk of 64."""
    L = torch.ones(64, 64, dtype=torch.float64).tril(-1)
    power = torch.linalg.matrix_power(L, 32)
    assert power[63, 0] == pytest.approx(math.comb(62, 31))
    assert math.comb(62, 31) == pytest.approx(4.7e17, rel=0.02)
    assert set(solve_tril(L).unique().tolist()) == {-1.0, 0.0, 1.0}
