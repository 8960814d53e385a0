"""Every numbered equation of docs/gdn-mathematics.md, unchanged, in fp64 against the recurrence.

One head of one sequence, as in the document.  Letters are those of the document.  A test that needs several stages
computes each from the one before, never from the reference's tensors.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_cases import GDNCase

from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.gdn.reference import gdn_recurrence

CHUNK = 16
LENGTH = 3 * CHUNK + 5  # the last chunk is short
K, V = 12, 20
close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-11)
Form = Callable[["Head", torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Head:
    """One head of one sequence in fp64: q, k (T, K), v (T, V), g, beta (T)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def slice(self, start: int, stop: int) -> "Head":
        return Head(*(getattr(self, field.name)[start:stop] for field in fields(self)))

    @property
    def G(self) -> torch.Tensor:
        """The running sum of g (9)."""
        return self.g.cumsum(0)


SCALE = K**-0.5


def drawn(seed: int = 0, length: int = LENGTH, collinear: float = 0.0) -> tuple[Head, torch.Tensor, GDNInputs]:
    """A head with normalised q and k, its initial state, and the inputs of this head, which the kernel normalises."""
    case = GDNCase(seqlen=length, key_dim=K, value_dim=V, largest_beta=2.0, collinear=collinear, seed=seed)
    inputs = case.but(initial_states=True).inputs()
    inputs.g.copy_(-5 * (inputs.g / 0.6).pow(4))  # from hardly any decay to exp(-5)
    normalised = [x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (inputs.q.double(), inputs.k.double())]
    head = Head(*(x[0, :, 0].double() for x in (*normalised, inputs.v, inputs.g, inputs.beta)))  # (1)
    return head, inputs.initial_state[0, 0].double(), inputs


def oracle(inputs: GDNInputs) -> tuple[torch.Tensor, torch.Tensor]:
    o, state = gdn_recurrence(inputs)
    return o[0, :, 0], state[0, 0]


# --- the equations of a chunk


def decays(G: torch.Tensor) -> torch.Tensor:
    return (G[:, None] - G[None]).clamp(max=0).exp()


def scaled_dot_kkt(head: Head) -> torch.Tensor:
    return (head.beta[:, None] * decays(head.G) * (head.k @ head.k.T)).tril(-1)  # (10)


def solve_tril(L: torch.Tensor) -> torch.Tensor:
    inverse = torch.zeros_like(L)
    for i in range(len(L)):
        inverse[i, i] = 1
        inverse[i] -= sum((L[i, j] * inverse[j] for j in range(i)), torch.zeros_like(L[i]))  # (12)
    return inverse


def written(head: Head, state: torch.Tensor) -> torch.Tensor:
    """v_new."""
    inverse = solve_tril(scaled_dot_kkt(head))
    w = inverse @ ((head.beta * head.G.exp())[:, None] * head.k)
    u = inverse @ (head.beta[:, None] * head.v)  # (14)
    return u - w @ state  # (15)


def six_stages(head: Head, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output of a chunk and the state after it."""
    G, v_new = head.G, written(head, state)
    after = G[-1].exp() * state + head.k.T @ ((G[-1] - G).exp()[:, None] * v_new)  # (16)
    scores = (head.q @ head.k.T * decays(G)).tril()
    return SCALE * (G.exp()[:, None] * (head.q @ state) + scores @ v_new), after  # (17)


def gate_free_inverse(head: Head) -> torch.Tensor:
    return solve_tril((head.beta[:, None] * (head.k @ head.k.T)).tril(-1))  # (18)


def x_and_w(head: Head) -> tuple[torch.Tensor, torch.Tensor]:
    """X (C, K) and W (C, C) of the two-product form."""
    G, A = head.G, gate_free_inverse(head)
    X = (head.beta * (G[-1] - G).exp())[:, None] * (A.T @ head.k)  # (21)
    return X, (head.beta[None] * decays(G) * ((head.q @ head.k.T).tril() @ A)).tril()  # (22)


def two_products(head: Head, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by the fused kernel's form."""
    (X, W), G = x_and_w(head), head.G
    Y = head.v - G.exp()[:, None] * (head.k @ state)  # (20)
    after = G[-1].exp() * state + X.T @ Y  # (23)
    return SCALE * (G.exp()[:, None] * (head.q @ state) + W @ Y), after  # (24)


FORMS = pytest.mark.parametrize("form", [six_stages, two_products])


# --- the recurrence


def test_recurrence() -> None:
    """(2) to (4), and (5): one matrix that forgets, erases and writes, and whose norm is at most exp(g)."""
    head, state, inputs = drawn()
    expected, final = oracle(inputs)
    other = state
    for t in range(LENGTH):
        k, forget = head.k[t], head.g[t].exp()
        v_new = head.beta[t] * (head.v[t] - forget * state.T @ k)
        state = forget * state + torch.outer(k, v_new)
        close(SCALE * state.T @ head.q[t], expected[t])
        erase = torch.eye(K, dtype=torch.float64) - head.beta[t] * torch.outer(k, k)
        assert torch.linalg.matrix_norm(erase, 2) <= 1 + 1e-12
        other = forget * erase @ other + head.beta[t] * torch.outer(k, head.v[t])
    close(state, final)
    close(other, final)


def test_unrolled() -> None:
    """(6) to (8), with the corrected values of the recurrence."""
    head, S0, inputs = drawn()
    expected, final = oracle(inputs)
    G, decay, v_new = head.G, decays(head.G), torch.zeros_like(head.v)
    for t in range(LENGTH):
        seen = (decay[t, :t, None] * (head.k[:t] @ head.k[t])[:, None] * v_new[:t]).sum(0)
        v_new[t] = head.beta[t] * (head.v[t] - G[t].exp() * S0.T @ head.k[t] - seen)  # (8)
    close(G[-1].exp() * S0 + head.k.T @ (decay[-1, :, None] * v_new), final)  # (6)
    scores = (head.q @ head.k.T * decay).tril()
    close(SCALE * (G.exp()[:, None] * (head.q @ S0) + scores @ v_new), expected)  # (7)


# --- the stages


def test_the_system_of_a_chunk() -> None:
    """(11): the corrected values of a chunk solve a unit lower triangular system."""
    head, state, _ = drawn(length=CHUNK)
    v_new, L = written(head, state), scaled_dot_kkt(head)
    close(v_new + L @ v_new, head.beta[:, None] * (head.v - head.G.exp()[:, None] * (head.k @ state)))


def test_the_inverse_by_rows_and_by_blocks() -> None:
    """(12), (13) and (13a)."""
    L = scaled_dot_kkt(drawn(length=CHUNK, collinear=0.9)[0])
    identity, inverse, half = torch.eye(CHUNK, dtype=torch.float64), solve_tril(L), CHUNK // 2
    close(inverse @ (identity + L), identity)
    top, bottom = solve_tril(L[:half, :half]), solve_tril(L[half:, half:])
    close(inverse[half:, :half], -bottom @ L[half:, :half] @ top)
    doubled, i = identity, torch.arange(CHUNK)
    for rows in (1, 2, 4, 8):
        of_pair, half_of_pair = i // (2 * rows), i // rows
        between = (of_pair[:, None] == of_pair[None]) & (half_of_pair[:, None] > half_of_pair[None])
        doubled = doubled - doubled @ (L * between) @ doubled
    close(doubled, inverse)


@FORMS
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**31), length=st.integers(1, 40), collinear=st.floats(0, 0.999))
@example(seed=0, length=LENGTH, collinear=0.99)
def test_chunk_after_chunk_is_the_recurrence(form: Form, seed: int, length: int, collinear: float) -> None:
    """(9) to (17), and (18) to (24)."""
    head, state, inputs = drawn(seed, length, collinear)
    outputs = []
    for start in range(0, length, CHUNK):
        o, state = form(head.slice(start, start + CHUNK), state)
        outputs.append(o)
    for ours, expected in zip((torch.cat(outputs), state), oracle(inputs), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-9)


@FORMS
def test_padding_neither_decays_nor_adds(form: Form) -> None:
    """A position with g = 0 and beta = 0 leaves the state as it is."""
    head, state, _ = drawn(length=CHUNK)
    head.g[10:], head.beta[10:] = 0, 0
    (o, after), (expected, final) = form(head, state), form(head.slice(0, 10), state)
    close(o[:10], expected)
    close(after, final)


# --- the fused form's parts


def test_the_gate_leaves_the_inverse() -> None:
    """(19): the inverse with gates is the gate-free one times a decay; X and W replace it and its factors."""
    head, _, _ = drawn(length=CHUNK)
    inverse, G, (X, W) = solve_tril(scaled_dot_kkt(head)), head.G, x_and_w(head)
    close(gate_free_inverse(head) * decays(G), inverse)
    close(X.T, head.k.T @ ((G[-1] - G).exp()[:, None] * inverse * head.beta))
    close(W, (head.q @ head.k.T * decays(G)).tril() @ (inverse * head.beta))


def test_folded_norms() -> None:
    """(25): raw q and k in every product, and the norms' inverses as factors of rows."""
    head, S, inputs = drawn(length=CHUNK)
    k, q = inputs.k[0, :, 0].double(), inputs.q[0, :, 0].double()
    e, a = ((x.square().sum(-1) + 1e-6).rsqrt() for x in (k, q))
    G = head.G
    A_e = e[:, None] * solve_tril((head.beta[:, None] * e[:, None] * e[None] * (k @ k.T)).tril(-1))
    Y = head.v - (G.exp() * e)[:, None] * (k @ S)
    X = (head.beta * (G[-1] - G).exp())[:, None] * (A_e.T @ k)
    W = (head.beta[None] * decays(G) * ((q @ k.T).tril() @ A_e)).tril()
    expected, final = oracle(inputs)
    close((SCALE * a)[:, None] * (G.exp()[:, None] * (q @ S) + W @ Y), expected)
    close(G[-1].exp() * S + X.T @ Y, final)


def test_a_stretch_maps_the_state_affinely() -> None:
    """(26) to (28): the matrix and the offset of a stretch of chunks, and the bound of the matrix."""
    head, state, inputs = drawn()
    M, N = torch.eye(K, dtype=torch.float64), torch.zeros_like(state)
    for start in range(0, LENGTH, CHUNK):
        piece = head.slice(start, start + CHUNK)
        G, (X, _) = piece.G, x_and_w(piece)
        M_c = G[-1].exp() * torch.eye(K, dtype=torch.float64) - X.T @ (G.exp()[:, None] * piece.k)
        M, N = M_c @ M, M_c @ N + X.T @ piece.v
    close(M @ state + N, oracle(inputs)[1])
    assert torch.linalg.matrix_norm(M, 2) <= head.g.sum().exp() * (1 + 1e-12)


# --- the inverse


@pytest.mark.parametrize("collinear", [0.0, 0.9, 0.999])
def test_entries_of_the_inverse_are_bounded(collinear: float) -> None:
    """(29) and its consequence: no entry exceeds beta, even if the keys are similar."""
    head, _, _ = drawn(length=CHUNK, collinear=collinear)
    A = gate_free_inverse(head)
    for j in range(CHUNK):
        moved = head.k[j]
        for i in range(j + 1, CHUNK):
            close(A[i, j], -head.beta[i] * (head.k[i] @ moved))
            moved = moved - head.beta[i] * head.k[i] * (head.k[i] @ moved)
    assert (A.tril(-1).abs().amax(1) <= head.beta * (1 + 1e-9)).all()


def test_powers_of_the_system_are_not() -> None:
    """(30): equal keys and beta = 1 in a chunk of 64."""
    L = torch.ones(64, 64, dtype=torch.float64).tril(-1)
    assert torch.linalg.matrix_power(L, 32)[63, 0] == pytest.approx(math.comb(62, 31))
    assert math.comb(62, 31) == pytest.approx(4.7e17, rel=0.02)
    assert set(solve_tril(L).unique().tolist()) == {-1.0, 0.0, 1.0}
