"""The whole stage: a model, a prompt, and one call per wanted layer."""

import errno
import gc
import os
import subprocess
import sys
import weakref
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
from capture import exact
from capture.exact import FP32_ROUNDING

from ssdprof.capture.intercept import OperatorCall, Result, intercept
from ssdprof.capture.layers import CapturedLayer, PromptBuffer, token_major
from ssdprof.capture.memory import capture_bytes_per_token
from ssdprof.checkpoint.mixers import find_mixers
from ssdprof.core.words import size_words
from ssdprof.errors import BadInputError, ExitCode, MissingCapabilityError
from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.ssd.inputs import SSDInputs

LENGTH = 90


def capture(
    name: str, *, ids: torch.Tensor | None = None, segment_length: int = LENGTH, **options: Any
) -> tuple[list[CapturedLayer], int]:
    prompt = tiny_models.prompt(LENGTH) if ids is None else ids
    return exact.capture(name, prompt, segment_length=segment_length, **options)


def assert_close(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    ones, others = one.tensors, other.tensors
    assert ones.keys() == others.keys()
    for name, tensor in ones.items():
        assert tensor.dtype == others[name].dtype
        assert tensor.shape == others[name].shape
        assert tensor.stride() == others[name].stride()
        assert float((tensor - others[name]).abs().max() / tensor.abs().max()) < FP32_ROUNDING
    for field in fields(one):
        if field.name not in ones:
            assert getattr(one, field.name) == getattr(other, field.name)


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_segments_together_are_the_whole_prompt(name: str) -> None:
    whole, one_piece = capture(name, segment_length=LENGTH)
    joined, segmented = capture(name, segment_length=40)
    sites = len(tiny_models.OPERATOR_LAYERS[name])
    assert (one_piece, segmented) == (sites, 3 * sites)
    assert (
        [one.layer for one in whole]
        == [one.layer for one in joined]
        == list(tiny_models.layer_refs(name))
    )
    for one, other in zip(whole, joined, strict=True):
        assert_close(one.inputs, other.inputs)
        assert not ({"initial_states", "initial_state"} & other.inputs.tensors.keys())


@pytest.mark.parametrize("name", ["bamba", "qwen3_next"])
def test_values_are_the_models_and_the_layout_is_a_kernels(name: str) -> None:
    model = tiny_models.build(name, torch.bfloat16).base_model
    passed: list[Any] = []

    def copy(call: OperatorCall) -> Result:
        passed.append(call.inputs)
        return call.run_original()

    ids = tiny_models.prompt(LENGTH)
    with torch.no_grad(), intercept(find_mixers(model), copy):
        model(ids, use_cache=False)
    # before any rounding by ssdprof
    first = capture(name, model=model, layers=tiny_models.layer_refs(name)[:1])[0][0]
    given = passed[0].tensors
    assert first.inputs.tensors.keys() == given.keys()
    for argument, tensor in first.inputs.tensors.items():
        assert tensor.dtype == given[argument].dtype
        assert torch.equal(tensor, given[argument])
        assert first.model_strides[argument] == given[argument].stride()
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
        assert first.model_strides["x"][1] == 1
        assert first.inputs.D is not None
        assert (first.inputs.A.dtype, first.inputs.D.dtype) == (torch.float32, torch.bfloat16)
    assert not any(tensor.requires_grad for tensor in first.inputs.tensors.values())


def test_only_wanted_layers_in_the_models_order() -> None:
    refs = tiny_models.layer_refs("zamba2")
    for segment_length in (LENGTH, 40):
        captured, _ = capture("zamba2", layers=(refs[4], refs[1]), segment_length=segment_length)
        assert [one.layer.index for one in captured] == [1, 4]


@pytest.mark.parametrize("segment_length", [LENGTH, 40])
def test_one_layer_at_a_time(segment_length: int) -> None:
    """When a layer arrives, the memory of the one before it is free."""
    alive: list[weakref.ref[torch.Tensor]] = []

    def on_layer(captured: CapturedLayer) -> None:
        gc.collect()
        assert [reference() for reference in alive] == [None] * len(alive)
        alive.append(weakref.ref(captured.inputs.tensors["dt"]))

    capture("mamba2", segment_length=segment_length, on_layer=on_layer)
    assert len(alive) == 3


def test_collecting_keeps_none_of_the_models_tensors() -> None:
    captured = capture("mamba2")[0][0]
    inputs = token_major(captured.inputs)
    reference = weakref.ref(inputs.values)
    buffer = PromptBuffer(inputs, LENGTH, torch.device("cpu"))
    buffer.write(inputs, 0)
    del inputs
    gc.collect()
    assert reference() is None
    assert_close(buffer.inputs(torch.device("cpu")), captured.inputs)


def test_layers_that_do_not_fit_main_memory_go_in_groups() -> None:
    sites = find_mixers(tiny_models.shared("mamba2").base_model)
    size = LENGTH * capture_bytes_per_token(sites[0])
    together, _ = capture("mamba2", segment_length=40)
    grouped, calls = capture("mamba2", segment_length=40, host_budget_bytes=2 * size)
    assert calls == 2 * 3 * 3  # two prefills of three segments
    for one, other in zip(together, grouped, strict=True):
        assert one.layer == other.layer
        assert_close(one.inputs, other.inputs)


def test_a_layer_that_does_not_fit_main_memory_goes_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    size = LENGTH * capture_bytes_per_token(find_mixers(tiny_models.shared("mamba2").base_model)[0])
    together, _ = capture("mamba2", segment_length=40)
    on_disk, calls = capture("mamba2", segment_length=40, host_budget_bytes=100)
    assert calls == 3 * 3
    for one, other in zip(together, on_disk, strict=True):
        assert all(
            torch.equal(tensor, other.inputs.tensors[name])
            for name, tensor in one.inputs.tensors.items()
        )
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=99))
    with pytest.raises(
        MissingCapabilityError, match=rf"90 tokens take {size_words(size)}, .*has room for 99 B\."
    ):
        capture("mamba2", segment_length=40, host_budget_bytes=100)


def test_a_disk_that_is_full_by_then_is_an_error_and_not_the_end_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Writing to a mapped file on a full disk is a bus error."""

    def refuse(_file: int, _start: int, size: int) -> None:
        if size > 100:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(
        MissingCapabilityError, match=r"no room for .* of captured inputs: No space left"
    ) as raised:
        capture("mamba2", segment_length=40, host_budget_bytes=100)
    assert "TMPDIR" in raised.value.hint


def test_a_million_tokens_take_more_than_2_to_the_31_elements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parts at both ends of the prompt have the right offsets.  The file is sparse: only their
    pages are written.
    """
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: None)
    seqlen, heads, dim, length = 1 << 20, 32, 64, 8
    generator = torch.Generator().manual_seed(0)

    def piece() -> SSDInputs:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(1, length, *shape, generator=generator).bfloat16()

        return SSDInputs(
            x=normal(heads, dim),
            dt=normal(heads),
            A=-torch.ones(heads),
            B=normal(1, 128),
            C=normal(1, 128),
        )

    first, last = piece(), piece()
    buffer = PromptBuffer(first, seqlen, torch.device("cpu"), on_disk=True)
    assert buffer.write(first, 0) == length
    buffer.write(last, seqlen - length)
    found = buffer.inputs(torch.device("cpu"))
    assert isinstance(found, SSDInputs)
    assert found.x.shape == (1, seqlen, heads, dim)
    assert seqlen * (heads * dim + 2 * 128) > 2**31
    assert found.C.stride(1) * (seqlen - 1) > 2**31
    for name in ("x", "dt", "B", "C"):
        assert torch.equal(getattr(found, name)[:, :length], getattr(first, name))
        assert torch.equal(getattr(found, name)[:, -length:], getattr(last, name))
        assert not getattr(found, name)[:, length : 2 * length].any()


def test_a_layer_that_bypasses_its_operator_is_an_error() -> None:
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
    segment_length: int, error: type[BaseException]
) -> None:
    model = tiny_models.build("nemotron_h").base_model
    site = find_mixers(model)[0]
    original, attention = site.namespace[site.function], model.config._attn_implementation
    ids = tiny_models.prompt(LENGTH)
    with torch.no_grad():
        before = model(ids)[0]

    def interrupt(_: CapturedLayer) -> None:
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
def test_no_prompt_and_no_layer(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        capture("mamba2", **options)


def test_importing_capture_imports_no_transformers() -> None:
    """Replays of stored captures need none."""
    code = (
        "import sys, ssdprof.capture.layers, ssdprof.checkpoint.load; print('transformers' in "
        "sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "False\n"
    )


def test_out_of_memory_says_what_to_do() -> None:
    def on_layer(_: CapturedLayer) -> None:
        raise torch.OutOfMemoryError("tried to allocate 5 GiB")

    with pytest.raises(
        MissingCapabilityError, match="cpu ran out of memory with segments of 90 tokens"
    ) as raised:
        capture("mamba2", on_layer=on_layer)
    assert "--seq" in raised.value.hint


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["granitemoehybrid", "qwen3_next"])
def test_segments_on_a_gpu(name: str) -> None:
    """Our GPU kernels and lower-right flash attention inside the model, in its usual dtype."""
    model = tiny_models.build(name, torch.bfloat16).base_model.cuda()
    whole, _ = capture(name, model=model, segment_length=LENGTH)
    joined, _ = capture(name, model=model, segment_length=40)
    for one, other in zip(whole, joined, strict=True):
        for argument, tensor in one.inputs.tensors.items():
            other_tensor = other.inputs.tensors[argument]
            assert tensor.device == other_tensor.device == model.device
            error = (tensor.float() - other_tensor.float()).square().mean().sqrt()
            assert error < 0.05 * tensor.float().square().mean().sqrt()
