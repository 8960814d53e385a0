"""Libraries' kernels of steps on a pool.  Stand-ins compute the operators by the recurrence, with
the libraries' conventions: an adapter that follows them agrees with the oracle, and keeps the laws.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import put
from measure.test_pools import found_by, step, trial
from targets import slow
from torch.nn import functional as F

from ssdprof import kernels, operators
from ssdprof.kernels.gdn.reference import gdn_recurrence
from ssdprof.kernels.kda.reference import kda_recurrence
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, UnsupportedError
from ssdprof.kernels.ssd.reference import ssd_recurrence
from ssdprof.measure import pools
from ssdprof.measure.accuracy import oracle_output
from ssdprof.operators.implementations import required, resolve

Given = dict[str, Any]  # arguments by name
RECURRENCES = {"gdn": gdn_recurrence, "kda": kda_recurrence, "ssd": ssd_recurrence}


def takes(names: str, compute: Callable[[Given], Any], **known) -> Callable[..., Any]:
    """names: of the positional arguments."""
    return lambda *values, **options: compute(
        known | dict(zip(names.split(), values, strict=True)) | options
    )


def stepped(pack, pool, reads, writes: Sequence[Any], bounds, none: int):
    """out, zeros where nothing is read.  pool: of GDN V-first.

    reads, writes: the slot that each sequence begins with, and those of the states after its
    tokens; those up to `none` are padding.
    """
    turned = pack.operator != "ssd"
    out = torch.zeros_like(pack.values)
    positional = operators.get(pack.operator).binding.positional
    for i, read in enumerate(reads.tolist()):
        if read <= none:
            continue
        state = (pool[read].mT if turned else pool[read])[None].float()
        for place, token in enumerate(range(int(bounds[i]), int(bounds[i + 1]))):
            one = {name: part[:, token : token + 1] for name, part in positional(pack).items()}
            result = RECURRENCES[pack.operator](replace(pack, **one, **{pack.STATES: state}))
            out[:, token], state = result.out[:, 0].to(out.dtype), result.final_states.float()
            slot = int(writes[i][min(place, len(writes[i]) - 1)])
            if slot > none:
                pool[slot] = (state[0].mT if turned else state[0]).to(pool.dtype)
    return out


def answered(given: Given, pack, pool, none: int):
    """By a table of slots, in place, or with all states in a buffer."""
    count = len(given["cu_seqlens"]) - 1
    slots = given["slots"]
    accepted = given.get("num_accepted_tokens")
    buffer = given.get("intermediate_states_buffer")
    if accepted is not None:
        reads = slots.gather(1, accepted.long()[:, None] - 1)[:, 0]
        writes = given.get("dst_state_batch_indices", slots)
        return stepped(pack, pool, reads, writes, given["cu_seqlens"], none)
    if buffer is None:
        return stepped(pack, pool, slots, slots[:, None], given["cu_seqlens"], none)
    together = torch.cat([pool, buffer.flatten(0, 1)])
    writes = torch.arange(len(pool), len(together)).view(count, -1)
    out = stepped(pack, together, slots, writes, given["cu_seqlens"], none)
    buffer.copy_(together[len(pool) :].view(buffer.shape))
    return out


def delta_rule(given: Given):
    """GDN or KDA, from gates before their activations."""
    given = dict(given)
    pool = given["initial_state"]
    none = given["none"]
    heads, value_dim, key_dim = pool.shape[1:]
    if "mixed" in given:  # one token of each sequence
        keys = (given["mixed"].shape[1] - heads * value_dim) // 2
        parts = torch.split(given["mixed"][None], [keys, keys, heads * value_dim], -1)
        dims = key_dim, key_dim, value_dim
        q, k, v = (part.unflatten(2, (-1, dim)) for part, dim in zip(parts, dims, strict=True))
        given["cu_seqlens"] = torch.arange(v.shape[1] + 1)
    else:
        q, k, v = (given[name] for name in "qkv")
        assert given["kind"] == "gdn" or q.stride(1) == k.stride(1) == v.stride(1)
    raw = given["a"].view(1, *v.shape[1:3], -1) + given["dt_bias"].view(heads, -1)
    g = -given["A_log"].exp()[:, None] * F.softplus(raw)
    kda = given.get("is_kda", given["kind"] == "kda")
    pack = (kernels.KDAInputs if kda else kernels.GDNInputs)(
        q=q,
        k=k,
        v=v,
        g=g if kda else g[..., 0],
        beta=given["b"].view(v.shape[:3]).sigmoid(),
        scale=given.get("scale"),
        use_qk_l2norm=given.get("use_qk_l2norm_in_kernel", True),
    )
    given["slots"] = given.get("ssm_state_indices", given.get("slots"))
    out = answered(given, pack, pool, none)
    if "out" in given:
        return given["out"].copy_(out.view(given["out"].shape))
    return (out, pool) if none == 0 else out


def flashinfer(given: Given):
    """Rows of one or a few tokens, with gates before their activations."""
    pool, reads = given["initial_state"], given["initial_state_indices"]
    shape = given["v"].shape
    g = -given["A_log"].exp() * F.softplus(given["a"] + given["dt_bias"])
    rows = {name: given[name] for name in "qkv"} | {"g": g, "beta": given["b"].sigmoid()}
    pack = kernels.GDNInputs(
        **{name: tensor.flatten(0, 1)[None] for name, tensor in rows.items()},
        scale=given["scale"],
        use_qk_l2norm=given["use_qk_l2norm"],
    )
    bounds = torch.arange(shape[0] + 1) * shape[1]
    if given.get("intermediate_states_buffer") is not None:
        out = answered(given | {"slots": reads, "cu_seqlens": bounds}, pack, pool, -1)
    else:
        writes = given.get("ssm_state_indices")
        if writes is None:
            writes = given["output_state_indices"][:, None]
        assert reads.is_contiguous()
        assert writes.is_contiguous()
        out = stepped(pack, pool, reads, writes, bounds, -1)
    return given["output"].copy_(out.view(shape)), pool


def mamba(given: Given):
    given = dict(given)
    x = given["x"]
    pool = given["pool"]
    assert given["A"].stride()[1:] == (0, 0), "the kernels' fast path wants one number a head"
    assert given.get("null_block_id", -1) == -1
    flat = {
        name: given[name].flatten(0, -3)[None] for name in ("x", "B", "C", "z") if name in given
    }
    dt = given["dt"][..., 0].flatten(0, -2)[None]
    more = {"D": given["D"], "dt_bias": given["dt_bias"][:, 0], "A": given["A"][:, 0, 0]}
    pack = kernels.SSDInputs(**flat, dt=dt, **more, dt_softplus=given["dt_softplus"])
    given["slots"] = given["state_batch_indices"]
    given.setdefault("cu_seqlens", torch.arange(len(x) + 1) * (x.shape[1] if x.ndim == 4 else 1))
    out = answered(given, pack, pool, -1).view(x.shape)
    return out if given.get("out") is None else given["out"].copy_(out)


PACKED = "mixed a b A_log dt_bias scale initial_state out slots"
VERIFIED = "A_log a dt_bias one twenty q k v b initial_state slots"
ONE = {op: f"fused_recurrent_{rule}_packed_decode" for op, rule in
       (("gdn", "gated_delta_rule"), ("kda", "kda"))}  # fmt: skip
UPDATE = "fused_sigmoid_gating_delta_rule_update"
MAMBA = takes("pool", mamba)
SGLANG = "sglang.kernels.ops.attention"
MODULES: dict[str, Given] = {
    "vllm.third_party.flash_linear_attention.ops": {
        ONE["gdn"]: takes(PACKED, delta_rule, kind="gdn", none=0),
        UPDATE: takes("A_log a b dt_bias q k v", delta_rule, kind="gdn", none=0),
    },
    "vllm.models.kimi_k3.nvidia.ops.third_party.kda": {
        ONE["kda"]: takes(
            "mixed a b A_log dt_bias bound initial_state slots scale",
            delta_rule,
            kind="kda",
            none=0,
        ),
        "fused_recurrent_kda": takes(
            "q k v a b A_log dt_bias bound initial_state cu_seqlens", delta_rule, kind="kda", none=0
        ),
    },
    f"{SGLANG}.fla.fused_recurrent": {
        name: takes(PACKED, delta_rule, kind=kind, none=-1) for kind, name in ONE.items()
    },
    f"{SGLANG}.linear.fused_sigmoid_gating_recurrent": {
        UPDATE: takes(VERIFIED, delta_rule, kind="gdn", none=-1)
    },
    "flashinfer.gdn_decode": {
        "gated_delta_rule_decode_pretranspose": takes("q k v state A_log a dt_bias b", flashinfer),
        "gated_delta_rule_mtp": takes(
            "q k v initial_state initial_state_indices A_log a dt_bias b", flashinfer
        ),
    },
    "vllm.model_executor.layers.mamba.ops.mamba_ssm": {"selective_state_update": MAMBA},
    "sglang.kernels.ops.mamba.triton_ops.mamba_ssm": {"selective_state_update": MAMBA},
    "mamba_ssm.ops.triton.selective_state_update": {"selective_state_update": MAMBA},
    "mamba_ssm": {"__version__": "9.9"},
}


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    for name, members in MODULES.items():
        put(monkeypatch, name, **members)
    monkeypatch.setattr("ssdprof.kernels.adapters.import_module", sys.modules.__getitem__)
    monkeypatch.setattr("ssdprof.kernels.gdn.adapters.import_module", sys.modules.__getitem__)
    monkeypatch.setattr("ssdprof.kernels.gdn.adapters.HEAD_DIM", 16)
    monkeypatch.setattr("ssdprof.kernels.adapters._UNRUN", ())


NAMES = [(op, name) for op in ("gdn", "kda", "ssd") for name in ("vllm_step", "sglang_step")]
NAMES += [("ssd", "selective_state_update"), ("gdn", "flashinfer_mtp")]


def named(operator: str, name: str) -> Implementation:
    return required(resolve(operators.get(operator), name))


@pytest.mark.parametrize("tokens", [1, 3, "every"])
@pytest.mark.parametrize(("operator", "name"), NAMES)
def test_a_step_is_the_recurrence(operator, name, tokens):
    """Twice: a call leaves its inputs as they were."""
    inputs = step(operator, seqlen=1 if tokens == 1 else 3, state_every=int(tokens == "every"))
    implementation = named(operator, name)
    if name == "selective_state_update" and tokens != 1:
        with pytest.raises(UnsupportedError, match=r"one token of each|every 1 positions"):
            implementation.run(inputs, Precision())
        return
    expected = oracle_output(inputs)
    for _ in range(2):
        out, states = implementation.run(inputs, Precision())
        torch.testing.assert_close(out.double(), expected[0].double(), rtol=2**-7, atol=1e-2)
        torch.testing.assert_close(states.double(), expected[1].double(), rtol=1e-4, atol=1e-4)


EVERYONES = {
    "other slots keep their bits",
    "padded rows touch nothing",
    "order and number of rows",
    "layouts of the pool",
    "slots beyond 2^31 elements",
    "indices of any form",
    "the same tensors with other values",
}
TABLES = {"a shared prefix", "drafted tokens"}


@pytest.mark.parametrize(("operator", "name"), [*NAMES[:1], *slow(*NAMES[1:])])
def test_laws_of_a_pool(operator, name):
    """Those that apply hold."""
    quick = pools.LAWS.keys() - {pools.SLOW}
    results = found_by(trial(named(operator, name), step(operator)), quick)
    assert not [reason for holds, reason in results.values() if holds == "no"]
    expected = EVERYONES | (TABLES if name in ("vllm_step", "flashinfer_mtp") else set())
    if name != "selective_state_update":
        expected.add("states are rounded once")
    if name == "vllm_step" or (name == "sglang_step" and operator != "ssd"):
        expected.add("sequences without tokens")
    assert {law for law, (holds, _) in results.items() if holds == "yes"} == expected


def test_a_pool_without_a_slot_for_padding_is_refused():
    pool = torch.zeros(2, 2, 16, 16).mT
    inputs = replace(step("gdn"), initial_state=pool, state_indices=torch.arange(2))
    run = named("gdn", "vllm_step").in_place
    with pytest.raises(UnsupportedError, match="slot 0 is padding"):
        run(inputs, Precision())


def test_flashinfer_refuses_a_state_that_no_slot_keeps():
    """Its kernel would write it outside of the pool."""
    inputs = step(seqlen=2)
    heads, key_dim, value_dim = inputs.states_shape[1:]
    pool = torch.zeros(6, heads, value_dim, key_dim).mT
    call = replace(
        inputs, initial_state=pool, state_indices=torch.tensor([0, 1], dtype=torch.int32)
    )
    in_place = named("gdn", "flashinfer_mtp").in_place
    kept = replace(call, write_indices=torch.tensor([[2, 3], [4, 5]], dtype=torch.int32))
    in_place(kept, Precision())
    dropped = replace(call, write_indices=torch.tensor([[2, -1], [4, 5]], dtype=torch.int32))
    with pytest.raises(UnsupportedError, match="a slot for the state after each token"):
        in_place(dropped, Precision())
