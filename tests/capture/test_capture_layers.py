"""The whole stage: a model, a prompt, and one call per wanted layer."""

import errno
import gc
import os
import weakref
from types import SimpleNamespace

import pytest
import tiny_models
import torch
from capture import exact
from capture.exact import FP32_ROUNDING, difference
from torch import Tensor

from ssdprof.capture.intercept import OperatorCall, Result, intercept
from ssdprof.capture.layers import CapturedLayer, PromptBuffer, token_major
from ssdprof.capture.memory import capture_bytes_per_token
from ssdprof.checkpoint.mixers import find_mixers
from ssdprof.core.words import size_words
from ssdprof.errors import BadInputError, ExitCode, MissingCapabilityError
from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.inputs import Inputs
from ssdprof.kernels.ssd.inputs import SSDInputs

LENGTH = 90


def capture(
    name: str, *, ids: Tensor | None = None, segment_length: int = LENGTH, **options
) -> tuple[list[CapturedLayer], int]:
    prompt = tiny_models.prompt(LENGTH) if ids is None else ids
    return exact.capture(name, prompt, segment_length=segment_length, **options)


def assert_close(actual: Inputs, expected: Inputs):
    assert type(actual) is type(expected)
    assert actual.scalars == expected.scalars
    assert actual.tensors.keys() == expected.tensors.keys()
    for name, tensor in actual.tensors.items():
        other = expected.tensors[name]
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (
            other.dtype,
            other.shape,
            other.stride(),
        )
        assert difference(tensor, other) < FP32_ROUNDING


@tiny_models.every_model
def test_segments_together_are_the_whole_prompt(name):
    whole, one_piece = capture(name, segment_length=LENGTH)
    joined, segmented = capture(name, segment_length=40)
    sites = len(tiny_models.OPERATOR_LAYERS[name])
    assert (one_piece, segmented) == (sites, 3 * sites)
    for layer, captured, segments in zip(tiny_models.layer_refs(name), whole, joined, strict=True):
        assert captured.layer == segments.layer == layer
        assert_close(segments.inputs, captured.inputs)
        assert segments.inputs.initial is None


@pytest.mark.parametrize("name", ["bamba", "qwen3_next"])
def test_values_are_the_models_and_the_layout_is_a_kernels(name):
    model = tiny_models.build(name, torch.bfloat16).base_model
    passed = []

    def copy(call: OperatorCall) -> Result:
        passed.append(call.inputs)
        return call.run_original()

    ids = tiny_models.prompt(LENGTH)
    with torch.no_grad(), intercept(find_mixers(model), copy):
        model(ids, use_cache=False)
    # before any rounding by ssdprof
    first = capture(name, model=model, layers=tiny_models.layer_refs(name)[:1])[0][0]
    of_model = passed[0].tensors
    assert first.inputs.tensors.keys() == of_model.keys()
    for argument, tensor in first.inputs.tensors.items():
        assert tensor.dtype == of_model[argument].dtype
        assert torch.equal(tensor, of_model[argument])
        assert tensor.stride(-1) == 1
    views = ("q", "k", "v") if isinstance(first.inputs, GDNInputs) else ("x", "B", "C")
    pieces = [first.inputs.tensors[argument] for argument in views]
    conv_dim = sum(piece.shape[2] * piece.shape[3] for piece in pieces)
    assert {piece.stride(1) for piece in pieces} == {conv_dim}
    assert len({piece.untyped_storage().data_ptr() for piece in pieces}) == 1
    widths = [piece.shape[2] * piece.shape[3] for piece in pieces]
    assert [piece.storage_offset() for piece in pieces] == [0, widths[0], widths[0] + widths[1]]
    if isinstance(first.inputs, SSDInputs):
        # positions are adjacent after transformers' convolution
        assert of_model["x"].stride(1) == 1
        assert (first.inputs.A.dtype, first.inputs.D.dtype) == (torch.float32, torch.bfloat16)
    assert not any(tensor.requires_grad for tensor in first.inputs.tensors.values())


def test_only_wanted_layers_in_the_models_order():
    refs = tiny_models.layer_refs("zamba2")
    for segment_length in (LENGTH, 40):
        captured, _ = capture("zamba2", layers=(refs[4], refs[1]), segment_length=segment_length)
        assert [layer.layer.index for layer in captured] == [1, 4]


@pytest.mark.parametrize("segment_length", [LENGTH, 40])
def test_one_layer_at_a_time(segment_length):
    """When a layer arrives, the memory of the one before it is free."""
    alive = []

    def on_layer(captured: CapturedLayer):
        gc.collect()
        assert [reference() for reference in alive] == [None] * len(alive)
        alive.append(weakref.ref(captured.inputs.tensors["dt"]))

    capture("mamba2", segment_length=segment_length, on_layer=on_layer)
    assert len(alive) == 3


def test_collecting_keeps_none_of_the_models_tensors():
    captured = capture("mamba2")[0][0]
    inputs = token_major(captured.inputs)
    reference = weakref.ref(inputs.values)
    buffer = PromptBuffer(inputs, LENGTH, torch.device("cpu"))
    buffer.write(inputs, 0)
    del inputs
    gc.collect()
    assert reference() is None
    assert_close(buffer.inputs(torch.device("cpu")), captured.inputs)


def test_layers_that_do_not_fit_main_memory_go_in_groups():
    sites = find_mixers(tiny_models.shared("mamba2").base_model)
    size = LENGTH * capture_bytes_per_token(sites[0])
    together, _ = capture("mamba2", segment_length=40)
    grouped, calls = capture("mamba2", segment_length=40, host_budget_bytes=2 * size)
    assert calls == 2 * 3 * 3  # two prefills of three segments
    for captured, expected in zip(grouped, together, strict=True):
        assert captured.layer == expected.layer
        assert_close(captured.inputs, expected.inputs)


def test_a_layer_that_does_not_fit_main_memory_goes_to_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    size = LENGTH * capture_bytes_per_token(find_mixers(tiny_models.shared("mamba2").base_model)[0])
    together, _ = capture("mamba2", segment_length=40)
    on_disk, calls = capture("mamba2", segment_length=40, host_budget_bytes=100)
    assert calls == 3 * 3
    exact.check_same(on_disk, together)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=99))
    with pytest.raises(
        MissingCapabilityError, match=rf"90 tokens take {size_words(size)}, .*has room for 99 B\."
    ):
        capture("mamba2", segment_length=40, host_budget_bytes=100)


def test_a_disk_that_is_full_by_then_is_an_error_and_not_the_end_of_the_process(monkeypatch):
    """Writing to a mapped file on a full disk is a bus error."""

    def refuse(_file: int, _start: int, size: int):
        if size > 100:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(
        MissingCapabilityError, match=r"no room for .* of captured inputs: No space left"
    ) as raised:
        capture("mamba2", segment_length=40, host_budget_bytes=100)
    assert "TMPDIR" in raised.value.hint


def test_a_million_tokens_take_more_than_2_to_the_31_elements(monkeypatch):
    """Parts at both ends of the prompt have the right offsets.  The file is sparse: only their
    pages are written.
    """
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: None)
    seqlen = 1 << 20
    heads = 32
    dim = 64
    length = 8

    def piece() -> SSDInputs:
        def normal(*shape: int) -> Tensor:
            return torch.randn(1, length, *shape).bfloat16()

        return SSDInputs(
            x=normal(heads, dim),
            dt=normal(heads),
            A=-torch.ones(heads),
            B=normal(1, 128),
            C=normal(1, 128),
        )

    first = piece()
    last = piece()
    buffer = PromptBuffer(first, seqlen, torch.device("cpu"), on_disk=True)
    assert buffer.write(first, 0) == length
    buffer.write(last, seqlen - length)
    inputs = buffer.inputs(torch.device("cpu"))
    assert isinstance(inputs, SSDInputs)
    assert inputs.x.shape == (1, seqlen, heads, dim)
    assert seqlen * (heads * dim + 2 * 128) > 2**31
    assert inputs.C.stride(1) * (seqlen - 1) > 2**31
    for name in ("x", "dt", "B", "C"):
        assert torch.equal(getattr(inputs, name)[:, :length], getattr(first, name))
        assert torch.equal(getattr(inputs, name)[:, -length:], getattr(last, name))
        assert not getattr(inputs, name)[:, length : 2 * length].any()


def test_a_layer_that_bypasses_its_operator_is_an_error():
    model = tiny_models.build("bamba").base_model
    # as a kernel for the whole layer would do
    model.layers[1].mamba.forward = lambda hidden_states, **_: hidden_states
    for segment_length, calls in (
        (LENGTH, "2 operator calls where 3 layers and 1"),
        (40, "6 operator calls"),
    ):
        with pytest.raises(BadInputError, match=f"bamba model made {calls}") as raised:
            capture("bamba", model=model, segment_length=segment_length)
        assert raised.value.exit_code == ExitCode.BAD_INPUT


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("segment_length", [LENGTH, 40])
def test_whatever_ends_a_capture_leaves_the_model_as_it_was(
    segment_length, error: type[BaseException]
):
    model = tiny_models.build("nemotron_h").base_model
    site = find_mixers(model)[0]
    original = site.namespace[site.function]
    attention = model.config._attn_implementation
    ids = tiny_models.prompt(LENGTH)
    with torch.no_grad():
        before = model(ids)[0]

    def interrupt(_: CapturedLayer):
        raise error

    with pytest.raises(error):
        capture("nemotron_h", model=model, segment_length=segment_length, on_layer=interrupt)
    assert site.namespace[site.function] is original
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert model.config._attn_implementation == attention
    with torch.no_grad():
        assert torch.equal(model(ids)[0], before)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"ids": torch.full((1, 4), tiny_models.VOCAB)},
            "token id 128; the model's vocabulary has 128",
        ),
        ({"ids": torch.tensor([[3, -1]])}, "token id -1"),
        ({"ids": torch.empty(1, 0, dtype=torch.int64)}, r"int64 ids, not \(1, 0\)"),
        ({"layers": ()}, "No layer was selected"),
    ],
)
def test_no_prompt_and_no_layer(options, words):
    with pytest.raises(BadInputError, match=words):
        capture("mamba2", **options)


def test_out_of_memory_says_what_to_do():
    def on_layer(_: CapturedLayer):
        raise torch.OutOfMemoryError("tried to allocate 5 GiB")

    with pytest.raises(
        MissingCapabilityError, match="cpu ran out of memory with segments of 90 tokens"
    ) as raised:
        capture("mamba2", on_layer=on_layer)
    assert "--seq" in raised.value.hint


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["granitemoehybrid", "qwen3_next"])
def test_segments_on_a_gpu(name):
    """Our GPU kernels and lower-right flash attention inside the model, in its usual dtype."""
    model = tiny_models.build(name, torch.bfloat16).base_model.cuda()
    whole, _ = capture(name, model=model, segment_length=LENGTH)
    joined, _ = capture(name, model=model, segment_length=40)
    for captured, segments in zip(whole, joined, strict=True):
        for argument, tensor in captured.inputs.tensors.items():
            joined_tensor = segments.inputs.tensors[argument]
            assert tensor.device == joined_tensor.device == model.device
            error = (tensor.float() - joined_tensor.float()).square().mean().sqrt()
            assert error < 0.05 * tensor.float().square().mean().sqrt()
