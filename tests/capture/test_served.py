"""Chunked prefill and packed sequences: the calls of a server, captured from the model."""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
import torch
from capture.exact import FP32_ROUNDING, capture, check_same, difference, oracle
from operators import toy

from ssdprof import operators
from ssdprof.capture import store
from ssdprof.capture.layers import packed
from ssdprof.core.target import Prompt, Serving
from ssdprof.errors import BadInputError

LENGTH = 50
NAMES = ["mamba2", "falcon_h1", "qwen3_next", "olmo_hybrid"]


def assert_close(actual: torch.Tensor, expected: torch.Tensor):
    assert actual.shape == expected.shape
    assert difference(actual, expected) < FP32_ROUNDING


@pytest.mark.parametrize("name", NAMES)
def test_chunks_carry_the_state_and_are_the_prompt_together(name):
    ids = tiny_models.prompt(LENGTH, batch=2)
    whole, _ = capture(name, ids, Serving())
    chunks, calls = capture(name, ids, Serving(chunk=16))
    layers = tiny_models.layer_refs(name)
    assert calls == 4 * len(layers)
    assert len(chunks) == 4 * len(layers)
    for captured in whole:
        pieces = []
        state = None
        of_layer = [chunk for chunk in chunks if chunk.layer == captured.layer]
        assert [chunk.inputs.length for chunk in of_layer] == [16, 16, 16, 2]
        for number, chunk in enumerate(of_layer, 1):
            assert (chunk.call.number, chunk.call.count) == (number, 4)
            if state is None:
                assert chunk.inputs.initial is None
            else:
                assert_close(chunk.inputs.initial, state)
            out, state = oracle(chunk.inputs)
            pieces.append(out)
        expected, final_state = oracle(captured.inputs)
        assert_close(torch.cat(pieces, 1), expected)
        assert_close(state, final_state)


def test_a_last_chunk_of_one_token_joins_the_one_before():
    chunks, calls = capture("mamba2", tiny_models.prompt(33), Serving(chunk=16))
    assert calls == 2 * 3
    assert {chunk.inputs.x.shape[1] for chunk in chunks} == {16, 17}
    assert len(Serving(chunk=16).calls(33)) == 2


@pytest.mark.parametrize("segment_length", [LENGTH, 8])
@pytest.mark.parametrize("name", NAMES)
def test_a_pack_is_its_sequences_alone(name, segment_length):
    lengths = (20, 1, 29)
    ids = tiny_models.prompt(LENGTH)
    packs, calls = capture(name, ids, Serving(packed=lengths), segment_length)
    assert calls == (3 if segment_length == LENGTH else 3 + 1 + 4) * len(
        tiny_models.layer_refs(name)
    )
    alone = [capture(name, row, Serving(), segment_length)[0] for row in ids.split(lengths, 1)]
    for number, pack in enumerate(packs):
        assert pack.inputs.cu_seqlens.tolist() == [0, 20, 21, 50]
        call = pack.call
        assert (call.kind, call.sequences, call.prompt_seqlen) == ("packed", 3, LENGTH)
        assert "went through the model one by one" in pack.remark
        binding = operators.get(pack.inputs.operator).binding
        sequences = [layers[number].inputs for layers in alone]
        for argument in pack.inputs.tensors.keys() & {*binding.views, *binding.per_position}:
            together = torch.cat([inputs.tensors[argument] for inputs in sequences], 1)
            assert torch.equal(pack.inputs.tensors[argument], together)
        outs = torch.cat([oracle(inputs)[0] for inputs in sequences], 1)
        assert_close(oracle(pack.inputs)[0], outs)


@pytest.mark.usefixtures("registries_of_its_own")
def test_inputs_without_sequence_bounds_cannot_be_packed():
    operators.register(toy.OPERATOR)
    inputs = toy.ToyInputs(x=torch.randn(1, 8, 2, 4), a=-torch.rand(1, 8, 2))
    with pytest.raises(BadInputError, match="Sequences of toy layers cannot be packed") as raised:
        packed(inputs, (3, 5))
    assert "--batch" in raised.value.hint


def writer_of(folder: Path, name: str, serving: Serving) -> store.CaptureWriter:
    prompt = Prompt(
        kind="random",
        source="ids",
        tokenizer="none",
        seqlen=LENGTH,
        token_sha256="",
        serving=serving,
    )
    ref = tiny_models.checkpoint_ref(name)
    return store.CaptureWriter(folder, checkpoint=ref, prompts=[prompt], segment_length=LENGTH)


@pytest.mark.parametrize(
    "serving", [Serving(packed=(20, 30)), Serving(chunk=20)], ids=["packed", "chunked"]
)
@pytest.mark.parametrize("name", ["mamba2", "qwen3_next"])
def test_stored_captures_keep_every_call(name, serving: Serving, tmp_path):
    calls, _ = capture(name, tiny_models.prompt(LENGTH), serving)
    with writer_of(tmp_path, name, serving) as writer:
        for captured in calls:
            writer.add(captured)
        with pytest.raises(ValueError, match="is in the manifest already"):
            writer.add(calls[0])
    manifest, load = store.load(tmp_path)
    assert manifest.prompts == writer.manifest.prompts
    assert len({stored.file for stored in manifest.layers}) == len(calls)
    check_same(map(load, manifest.layers), calls)


@pytest.mark.parametrize("bounds", [[0, 30, 20, LENGTH], [0, 20, LENGTH + 1], [1, LENGTH]])
@pytest.mark.parametrize("name", ["mamba2", "qwen3_next"])
def test_a_stored_pack_whose_bounds_fall_or_leave_the_prompt_is_refused(name, bounds, tmp_path):
    serving = Serving(packed=(20, 30))
    (first, *_), _ = capture(name, tiny_models.prompt(LENGTH), serving)
    wrong = replace(first, inputs=replace(first.inputs, cu_seqlens=torch.tensor(bounds)))
    with writer_of(tmp_path, name, serving) as writer:
        stored = writer.add(wrong)
    with pytest.raises(BadInputError, match=f"cu_seqlens must rise from 0 to {LENGTH}"):
        store.load(tmp_path)[1](stored)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["granitemoehybrid", "mamba2", "qwen3_next", "olmo_hybrid"])
def test_a_rank_computes_its_heads_of_the_whole(name, ranks):
    """granitemoehybrid has one group, which every rank gets; mamba2 has two groups."""
    (captured, *_), _ = capture(name, tiny_models.prompt(20), Serving())
    inputs = captured.inputs
    operator = operators.get(inputs.operator)
    sizes = operator.oracle.dims(inputs).sizes
    why = operator.refusal(sizes, ranks)
    if (name, ranks) == ("mamba2", 4):
        assert why == (
            "its 2 groups cannot be divided by 4, and only a single group is repeated on every rank"
        )
        return
    if (name, ranks) == ("qwen3_next", 4):
        assert why == "its 2 key heads cannot be divided by 4"
        return
    assert why == ""
    out, states = oracle(inputs)
    if state_field := {"initial_state", "initial_states"} & vars(inputs).keys():
        # with an initial state, as for a chunk
        inputs = replace(inputs, **dict.fromkeys(state_field, states))
        out, states = oracle(inputs)
    of_rank = operator.first_rank(inputs, ranks)
    heads = out.shape[2] // ranks
    rank_out, rank_states = oracle(of_rank)
    # but for roundings in fp64: vector instructions round otherwise, and what they take depends on
    # the number of heads
    assert difference(rank_out, out[:, :, :heads]) < 1e-14
    assert difference(rank_states, states[:, :heads]) < 1e-14


def test_heads_that_ranks_cannot_share():
    refusal = operators.get("ssd").refusal
    assert refusal({"nheads": 48, "ngroups": 1}, 5) == "its 48 heads cannot be divided by 5"
    assert refusal({"nheads": 128, "ngroups": 8}, 8) == ""
