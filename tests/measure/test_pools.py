"""Each law of a pool finds the kernel that breaks it and names the place; good kernels keep all."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from generated_inputs import generated
from targets import OPERATORS, slow

from ssdprof import kernels, operators
from ssdprof.core.base import BETWEEN_CALLS
from ssdprof.jobs.failures import keeping, load_call
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, UnsupportedError
from ssdprof.measure import pools, probes
from ssdprof.measure.isolate import IsolatedFirstCall, try_call
from ssdprof.measure.laws import Trial
from ssdprof.measure.probes import Prober
from ssdprof.operators import serving
from ssdprof.operators.implementations import own_implementation, resolve
from ssdprof.operators.operator import OutputPair
from ssdprof.operators.serving import gathered
from ssdprof.store.reports import FAILURES

SHAPES = {"gdn": "1/2x16x16", "kda": "2/2x16x16", "ssd": "2x16x16x1"}
Kernel = Callable[[Any], OutputPair]
ON_A_GPU = {"a replayed CUDA graph", "beside another stream"}


def step(operator: str = "gdn", **tokens):
    """One token of two sequences."""
    return generated(operator, SHAPES[operator], **{"sequences": 2, "seqlen": 1} | tokens)


def good(inputs) -> OutputPair:
    """The oracle, on gathered states."""
    return gathered(kernels.get(inputs.operator, "reference"), inputs, Precision())


def working_in_place(kernel: Kernel, operator: str = "gdn"):
    """A user's implementation."""
    kernel = partial(kernel)
    kernel.in_place = True  # type: ignore[attr-defined]
    return own_implementation(operators.get(operator), "mine:kernel", kernel)


def trial(implementation: Implementation, inputs: Any = None) -> Trial:
    return probes._trial(
        implementation,
        inputs or step(),
        Precision(),
        IsolatedFirstCall(),
        by_every_law=True,
        interpreted=True,
    )


def found_by(of_kernel: Trial, laws: Iterable[str]) -> dict[str, tuple[str, str]]:
    """What the laws say of a kernel, and why."""
    results = {law: probes.try_law(of_kernel, BETWEEN_CALLS + law) for law in laws}
    return {law: (probe.holds, probe.detail) for law, probe in results.items()}


def tried(law: str, kernel: Kernel, operator: str = "gdn", **more) -> str:
    """Where the law does not hold; empty if it does."""
    one = replace(working_in_place(kernel, operator), **more)
    try:
        pools.LAWS[law](pools.Room(trial(one, step(operator))))
    except pools.Broken as error:
        return str(error)
    return ""


def reads(inputs) -> list[int]:
    return inputs.slots_read.tolist()


def positional(inputs) -> dict[str, torch.Tensor]:
    return operators.get(inputs.operator).binding.positional(inputs)


# --- wrong kernels


def clamping_padding(inputs) -> OutputPair:
    return good(replace(inputs, state_indices=inputs.state_indices.clamp(min=0)))


def adding_padding_times_zero(inputs) -> OutputPair:
    out, pool = good(inputs)
    slots = reads(inputs)
    if -1 in slots:
        pool[max(slots)] += 0 * inputs.v[slots.index(-1)].sum()
    return out, pool


def writing_behind_the_last_of_an_odd_number(inputs) -> OutputPair:
    out, pool = good(inputs)
    if inputs.sequences % 2:
        pool[reads(inputs)[-1] + 1, 1] *= 0.5
    return out, pool


def advancing_the_slot_before_the_first(inputs) -> OutputPair:
    out, pool = good(inputs)
    if -1 in reads(inputs):
        start = int(pool.storage_offset()) - pool.stride(0)
        pool.as_strided(pool.shape, pool.stride(), start)[0] *= 0.5
    return out, pool


def writing_between_slots(inputs) -> OutputPair:
    out, pool = good(inputs)
    pool.as_strided((len(pool), pool[0].numel() + 1), (pool.stride(0), 1))[3, -1] = 0
    return out, pool


def clearing_slots_without_tokens(inputs) -> OutputPair:
    out, pool = good(inputs)
    for slot, length in zip(reads(inputs), inputs.cu_seqlens.diff(), strict=True):
        if not length:
            pool[slot] = 0
    return out, pool


def beginning_with_what_the_slot_holds(inputs) -> OutputPair:
    slots = inputs.state_indices
    return good(replace(inputs, state_indices=torch.where(slots < 0, inputs.write_indices, slots)))


def updating_its_source(inputs) -> OutputPair:
    out, pool = good(inputs)
    pool[reads(inputs)[0]] = pool[inputs.write_indices[0]]
    return out, pool


def one_accepted_too_many(inputs) -> OutputPair:
    most = inputs.state_indices.shape[1]
    return good(replace(inputs, accepted=(inputs.accepted + 1).clamp(max=most)))


def keeping_the_last_state_alone(inputs) -> OutputPair:
    if inputs.write_indices.ndim == 2:
        table = inputs.write_indices.clone()
        table[:, :-1] = -1
        inputs = replace(inputs, write_indices=table)
    return good(inputs)


def a_step_reads_the_first_column(inputs) -> OutputPair:
    if inputs.length == 1:
        inputs = replace(inputs, accepted=torch.ones_like(inputs.accepted))
    return good(inputs)


def one_row_is_special(inputs) -> OutputPair:
    out, pool = good(inputs)
    return (out * 1.25 if inputs.sequences == 1 else out), pool


def hardly_invariant(inputs) -> OutputPair:
    out, pool = good(inputs)
    if inputs.sequences == 1:
        pool[reads(inputs)] *= 1 + 2.0**-22
    return out, pool


def without_rows_beyond_a_block(inputs) -> OutputPair:
    pool = inputs.initial_state.clone()
    out, changed = good(inputs)
    for slot in reads(inputs)[16:]:
        changed[slot] = pool[slot]
    return out, changed


def minus_one_of_int64_is_a_slot(inputs) -> OutputPair:
    slots = inputs.state_indices
    last = len(inputs.initial_state) - 1
    if slots.dtype == torch.int64:
        slots = torch.where(slots < 0, last, slots)
    return good(replace(inputs, state_indices=slots))


def int64_as_two_words(inputs) -> OutputPair:
    slots = inputs.state_indices
    if slots.dtype == torch.int64:
        slots = slots.view(torch.int32)[: len(slots)]
    return good(replace(inputs, state_indices=slots))


def without_strides_of_indices(inputs) -> OutputPair:
    slots = inputs.state_indices.as_strided(inputs.state_indices.shape, (1,))
    return good(replace(inputs, state_indices=slots))


def updating_a_copy(inputs) -> OutputPair:
    out, _ = good(replace(inputs, initial_state=inputs.initial_state.contiguous()))
    return out, inputs.initial_state


def returning_a_copy(inputs) -> OutputPair:
    out, pool = good(inputs)
    return out, pool.clone()


def rounding_after_each_token(inputs) -> OutputPair:
    outs = []
    for token in range(inputs.length):
        cut = {name: one[:, token : token + 1] for name, one in positional(inputs).items()}
        outs.append(good(replace(inputs, **cut))[0])
    return torch.cat(outs, 1), inputs.initial_state


def offsets_in_32_bits(inputs) -> OutputPair:
    pool = inputs.initial_state
    near = [slot for slot in range(len(pool)) if slot * pool.stride(0) < 2**31]
    kept = pool[len(near) :].clone()
    out, _ = good(inputs)
    pool[len(near) :] = kept
    return out, pool


def changing_the_tokens(inputs) -> OutputPair:
    output = good(inputs)
    inputs.v[0] += 1
    return output


class WrongInItsFortiethCall:
    calls = 0

    def __call__(self, inputs) -> OutputPair:
        self.calls += 1
        out, pool = good(inputs)
        if self.calls == 40:
            pool[max(reads(inputs))] *= 1.5
        return out, pool


class SlotsByAddress:
    """It reads the slots of a tensor once, as a server that copies them to the host does."""

    def __init__(self):
        self.slots: dict[int, torch.Tensor] = {}

    def __call__(self, inputs) -> OutputPair:
        slots = inputs.state_indices
        return good(
            replace(inputs, state_indices=self.slots.setdefault(slots.data_ptr(), slots.clone()))
        )


def nan_behind_a_wrong_row(inputs) -> OutputPair:
    out, pool = good(inputs)
    out[0] += 1
    out[3, :, 1] = torch.nan
    return out, pool


def raising(inputs) -> OutputPair:
    raise IndexError("slot -1")


@pytest.mark.parametrize(
    ("law", "kernel", "place"),
    [
        ("other slots keep their bits", writing_behind_the_last_of_an_odd_number,
         "call 1: it changes slot 8, head 1, beside one that is written, which no row writes"),
        ("other slots keep their bits", writing_between_slots, "the memory behind slot 3"),
        ("other slots keep their bits", returning_a_copy, "another tensor than the pool"),
        ("other slots keep their bits", changing_the_tokens, "call 1: it changes its inputs: v"),
        ("other slots keep their bits", nan_behind_a_wrong_row, "call 1, row 3, token 0, head 1"),
        ("other slots keep their bits", raising, "call 1: IndexError: slot -1"),
        ("padded rows touch nothing", clamping_padding, "call 1, row 3"),
        ("padded rows touch nothing", advancing_the_slot_before_the_first, "before the first slot"),
        ("padded rows touch nothing", adding_padding_times_zero, "call 1, row 6, slot 12, head 0"),
        ("sequences without tokens", clearing_slots_without_tokens,
         "call 1: it changes slot 0, head 0, the first slot"),
        ("new sequences begin with zeros", beginning_with_what_the_slot_holds, "call 1, row 0"),
        ("a shared prefix", updating_its_source, "call 1: it changes slot 3"),
        ("drafted tokens", one_accepted_too_many, "call 1, row 0, token 0, head 1"),
        ("drafted tokens", keeping_the_last_state_alone, "call 2, row 0, token 0"),
        ("drafted tokens", a_step_reads_the_first_column, "call 3, row 0, token 0"),
        ("order and number of rows", one_row_is_special, "call 3, row 0, token 0"),
        ("padded rows touch nothing", without_rows_beyond_a_block, "call 4, row 17, slot 5"),
        ("indices of any form", minus_one_of_int64_is_a_slot, "call 1: it changes slot 12"),
        ("indices of any form", int64_as_two_words, "call 1"),
        ("indices of any form", without_strides_of_indices, "call 3"),
        ("layouts of the pool", updating_a_copy, "call 1, row 0, slot 2"),
        ("states are rounded once", rounding_after_each_token, "call 2, row 0, slot 9, head 0"),
        ("slots beyond 2^31 elements", offsets_in_32_bits, "call 1, row 0, slot 2"),
        ("64 mixed calls", WrongInItsFortiethCall(), "call 40, row 1, head 0"),
        ("the same tensors with other values", SlotsByAddress(), "call 2"),
    ],
)  # fmt: skip
def test_a_law_names_the_first_place(law, kernel: Kernel, place):
    assert place in tried(law, kernel)


def test_a_write_behind_the_pool_of_a_first_call_is_named_so():
    _, reason = try_call(working_in_place(writing_between_slots), step(), Precision())
    assert "behind its pool of states, of shape (4, 2, 16, 16)" in reason


def test_a_call_of_padding_alone_changes_no_slot():
    inputs = step(pool=4)
    before = inputs.initial_state.clone()
    good(replace(inputs, state_indices=torch.full_like(inputs.state_indices, -1)))
    torch.testing.assert_close(inputs.initial_state, before, rtol=0, atol=0, equal_nan=True)


def test_bits_are_compared_where_batch_invariance_is_declared():
    law = "order and number of rows"
    assert tried(law, hardly_invariant) == ""
    assert "batch invariance is declared" in tried(law, hardly_invariant, batch_invariant=True)
    assert tried(law, good, batch_invariant=True) == ""


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("law", [law for law in pools.LAWS if law not in ON_A_GPU])
def test_a_good_kernel_keeps_every_law(law, operator):
    assert tried(law, good, operator) == ""


def test_a_pool_of_a_tiny_layer_is_compared():
    tiny = trial(working_in_place(good), generated("gdn", "1/1x8x8", 1))
    assert found_by(tiny, ["layouts of the pool"]) == {"layouts of the pool": ("yes", "")}


# fused gathers states for prompts; steps and drafted tokens are calls of the recurrent kernel
OURS = [
    ("gdn", "recurrent"),
    *slow(("kda", "recurrent"), ("ssd", "recurrent")),
    *slow(*((operator, "fused") for operator in SHAPES)),
]


@pytest.mark.parametrize(("operator", "name"), OURS)
def test_our_kernels_keep_every_law(operator, name):
    one = kernels.get(operator, name)
    quick = pools.LAWS.keys() - {pools.SLOW}
    found = found_by(trial(one, step(operator)), quick)
    held = {law for law, result in found.items() if result == ("yes", "")}
    assert held == quick - ON_A_GPU
    assert {found[law] for law in ON_A_GPU} == {("not tested", "it needs a GPU")}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["recurrent", "fused"])
@pytest.mark.parametrize("operator", SHAPES)
def test_our_kernels_keep_every_law_on_a_gpu(operator, name):
    one = kernels.get(operator, name)
    inputs = step(operator)
    moved = {field: value.cuda() for field, value in vars(inputs).items() if torch.is_tensor(value)}
    found = found_by(trial(one, replace(inputs, **moved)), pools.LAWS)
    assert {law: result for law, result in found.items() if result[0] != "yes"} == {}


@pytest.mark.parametrize(
    ("law", "kernel", "wrong_slots", "padded_rows"),
    [
        ("padded rows touch nothing", clamping_padding, 1, [1, 4, 7]),
        ("drafted tokens", keeping_the_last_state_alone, 20, [5]),
        ("slots beyond 2^31 elements", offsets_in_32_bits, 1, []),
    ],
)
def test_the_call_that_broke_a_law_is_kept_with_its_pool(
    law, kernel: Kernel, wrong_slots, padded_rows, tmp_path, monkeypatch
):
    monkeypatch.setattr(kernel, "in_place", True, raising=False)
    one = resolve(operators.get("gdn"), f"test_pools:{kernel.__name__}")
    called = SimpleNamespace(implementation=one, precision=Precision())
    keep = partial(keeping(tmp_path), SimpleNamespace(call=called, case=SimpleNamespace(id="id")))
    probe = probes.try_law(trial(one), BETWEEN_CALLS + law, keep)
    assert probe.detail.startswith("call 1"), "a chain names the first call that is wrong alone"
    (file,) = (tmp_path / FAILURES).glob("id-between-calls-*.safetensors")
    call = load_call(file)
    expected_out, expected = call.expected
    for _, states in (call.actual, call.run(), call.run()):  # each on a copy of the pool
        wrong = (states - expected).abs().nan_to_num(9).amax((1, 2, 3)) > 1e-3
        assert wrong.sum() == wrong_slots
    assert expected_out.isnan().flatten(1).all(1).nonzero().flatten().tolist() == padded_rows
    pool = call.inputs.tensors["initial_state"]
    assert law.startswith("slots") or pool.as_strided((64,), (1,), 0).isnan().all(), "a guard"


# --- when


def test_a_kernel_that_refuses_some_calls_is_judged_by_the_others():
    def steps_alone(inputs) -> OutputPair:
        if inputs.length > 1:
            raise UnsupportedError("one token")
        return good(inputs)

    def halving_drafts_alone(inputs) -> OutputPair:
        if inputs.length == 1:
            raise UnsupportedError("drafts")
        out, pool = good(inputs)
        return out / 2, pool

    assert tried("drafted tokens", halving_drafts_alone).startswith("call 1, row 0")
    found = found_by(trial(working_in_place(steps_alone)), ("a shared prefix", "drafted tokens"))
    assert found == {
        "a shared prefix": ("yes", "in 1 of its calls: one token"),
        "drafted tokens": ("not applicable", "one token"),
    }


@pytest.mark.parametrize(
    ("name", "inputs", "tested"),
    [
        ("recurrent", {}, True),
        ("recurrent", {"seqlen": 3, "state_every": 1}, True),
        ("fused", {}, True),
        ("unfused_step", {}, False),
        ("recurrent", {"seqlen": 3}, False),
        ("fused", {"seqlen": 40}, False),
    ],
)
def test_only_calls_of_servers_are_tested(name, inputs, tested):
    assert probes.applies(kernels.get("gdn", name), step(**inputs)) == tested


def test_a_users_kernel_is_tested_once_for_a_kind_of_layer(monkeypatch):
    law = "new sequences begin with zeros"
    monkeypatch.setattr(pools, "LAWS", {law: pools.LAWS[law]})
    monkeypatch.setattr(probes, "laws_of", lambda _trial: {})

    def kernel(inputs) -> OutputPair:
        return beginning_with_what_the_slot_holds(inputs) if -1 in reads(inputs) else good(inputs)

    own = working_in_place(kernel)
    prober = Prober(IsolatedFirstCall())
    found = [
        prober.probe(own, inputs, Precision()) for inputs in (step(), step(), step(sequences=3))
    ]
    between = [
        [probe.holds for probe in of_call if probe.name == BETWEEN_CALLS + law] for of_call in found
    ]
    assert between == [["no"], [], []]


def test_a_call_without_a_pool_runs_on_one_of_its_own():
    """A kernel that works in place gives the final states, and those after each token; again, too,
    and of a pool, whose slots it does not write.
    """
    one = working_in_place(good)
    row = {name: tensor[:1] for name, tensor in positional(step(seqlen=5)).items()}
    with_an_empty_sequence = replace(step(), **row, cu_seqlens=torch.tensor([0, 5, 5]))
    for inputs in (
        step(),
        step(seqlen=3, state_every=1),
        step(seqlen=9, shortest=2),
        step(pool=5),
        with_an_empty_sequence,
    ):
        before = inputs.initial_state.clone()
        for _ in range(2):
            for ours, expected in zip(
                one.run(inputs, Precision()),
                kernels.get("gdn", "reference").run(inputs.after(inputs.initial), Precision()),
                strict=True,
            ):
                assert torch.equal(ours, expected)
        assert torch.equal(inputs.initial_state.nan_to_num(), before.nan_to_num())
    assert not one.run(with_an_empty_sequence.after(None), Precision()).final_states[1].any()


@pytest.mark.parametrize("operator", SHAPES)
def test_fused_computes_drafted_tokens_in_place(operator, monkeypatch):
    """As `recurrent` does, in one launch: gathered states would take several times as long."""
    monkeypatch.setattr(serving, "gathered", None)
    results = []
    for name in ("fused", "recurrent"):
        own_pool = serving.in_pool(kernels.get(operator, name))
        results.append(own_pool.run(step(operator, seqlen=4, state_every=1), Precision()))
    for fused, recurrent in zip(*results, strict=True):
        assert torch.equal(fused, recurrent)
