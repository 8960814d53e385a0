"""Segment lengths by memory, and the error when none fits."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers as tf
from capture.exact import capture

from ssdprof.capture.memory import (
    MemoryEstimate,
    capture_bytes_per_token,
    choose_segment_length,
    decoder_layer_bytes,
    estimate_memory,
)
from ssdprof.checkpoint.meta import find_mixers
from ssdprof.core.words import size_words
from ssdprof.environment import machine
from ssdprof.environment.machine import free_memory, host_memory
from ssdprof.errors import ExitCode, MissingCapabilityError
from ssdprof.operators.tensors import tensors

GIB = 2**30


def model_and_footprint(name: str) -> tuple[Any, MemoryEstimate]:
    model = tiny_models.shared(name).base_model
    indices = tiny_models.OPERATOR_LAYERS[name]
    return model, estimate_memory(model, set(indices), depth=max(indices))


def on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return tf.AutoModel.from_config(config, dtype=torch.bfloat16)


def mamba2(hidden: int, heads: int, groups: int = 1) -> Any:
    return tf.Mamba2Config(
        hidden_size=hidden, num_heads=heads, head_dim=64, state_size=128, n_groups=groups, num_hidden_layers=1
    )


def qwen3_next(**experts: int) -> Any:
    sizes = dict(num_experts=1, num_experts_per_tok=1, moe_intermediate_size=16) | experts
    return tf.Qwen3NextConfig(
        hidden_size=2048, linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
        linear_value_head_dim=128, num_hidden_layers=1, shared_expert_intermediate_size=16, **sizes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "gib"),
    [
        (mamba2(768, 24), 4.4),  # mamba2-130m
        (mamba2(2560, 80), 14.6),  # mamba2-2.7b
        (mamba2(4096, 128, groups=8), 24.2),  # Codestral-7B
        (qwen3_next(), 12.6),
    ],
)
def test_activations_are_near_the_exact_peak_of_a_decoder_layer(config: Any, gib: float) -> None:
    """Exact peak: live storages of one layer on meta tensors at 131,072 tokens, with the operator replaced."""
    need = estimate_memory(on_meta(config), {0}, depth=0)
    assert need.activations * 131072 / GIB == pytest.approx(gib, rel=0.06)


def test_every_expert_of_a_token_needs_its_activations() -> None:
    sizes = dict(num_experts=8, moe_intermediate_size=8192)
    configs = (qwen3_next(**sizes, num_experts_per_tok=n) for n in (4, 6))
    four, six = (estimate_memory(on_meta(config), {0}, depth=0) for config in configs)
    assert six.activations - four.activations == 2 * 2 * 2 * (2 * 8192 + 2048)  # gate and up of two experts, in bf16


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_capture_bytes_are_those_of_the_captured_tensors(name: str) -> None:
    model, need = model_and_footprint(name)
    found, _ = capture(name, tiny_models.prompt(50), model=model)
    sizes = [
        sum(t.numel() * t.element_size() for t in tensors(one.inputs).values() if t.ndim > 2) // 50 for one in found
    ]
    assert sizes == [capture_bytes_per_token(site) for site in find_mixers(model)]
    assert need.capture == max(sizes)


def test_attention_needs_its_cache() -> None:
    _, bamba = model_and_footprint("bamba")
    assert bamba.attention_cache == 2 * (2 * 2 * 16 * 4)  # once kept and once copied: k and v, 2 heads of 16 in fp32
    assert model_and_footprint("mamba2")[1].attention_cache == 0


def test_decoder_layers_share_the_weights_between_them() -> None:
    model = tiny_models.shared("mamba2").base_model
    sizes = decoder_layer_bytes(model)
    assert list(sizes) == [0, 1, 2]
    outside = sum(p.numel() * 4 for name, p in model.named_parameters() if "layers." not in name)
    assert sum(sizes.values()) + outside == sum(p.numel() * 4 for p in model.parameters())


def wide_bamba(layers: int = 4) -> Any:
    """An MLP so wide that activations, not the captured inputs, set the limit."""
    return on_meta(
        tf.BambaConfig(
            vocab_size=128, hidden_size=64, intermediate_size=1 << 17, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, attn_layer_indices=[2], mamba_n_heads=8, mamba_d_state=16,
            mamba_n_groups=1,
        )
    )  # fmt: skip


LAYERS = tiny_models.layer_refs("bamba")
SEQLEN = 131072


@pytest.mark.parametrize("length", [SEQLEN, 16384, 8192, 4096, 2048])
def test_the_longest_segment_that_fits(length: int) -> None:
    model = wide_bamba()
    need = estimate_memory(model, {0, 1, 3}, depth=3)
    enough = need.one_shot(SEQLEN) if length == SEQLEN else need.segmented(SEQLEN, length)
    assert choose_segment_length(model, SEQLEN, LAYERS, free_bytes=enough) == length
    assert choose_segment_length(model, SEQLEN, LAYERS, free_bytes=2 * enough, batch=2) == length
    assert choose_segment_length(model, SEQLEN, LAYERS, free_bytes=enough - 1) < length
    assert choose_segment_length(model, 500, LAYERS, free_bytes=enough) == 500


def test_too_little_memory_says_how_much_was_needed_and_what_fits() -> None:
    model, need = model_and_footprint("mamba2")
    layers = tiny_models.layer_refs("mamba2")
    needed = need.segmented(SEQLEN, 1024)
    with pytest.raises(MissingCapabilityError) as raised:
        choose_segment_length(model, SEQLEN, layers, free_bytes=needed // 2)
    assert raised.value.exit_code == ExitCode.MISSING_CAPABILITY
    assert f"131,072 tokens needs {size_words(needed)} ({needed:,} bytes)" in raised.value.message
    assert f"({needed // 2:,} bytes) are free" in raised.value.message
    suggested = re.search(r"--seq (\d+)", raised.value.hint)
    assert suggested is not None
    assert 1024 <= int(suggested[1]) < SEQLEN
    choose_segment_length(model, int(suggested[1]), layers, free_bytes=needed // 2)
    with pytest.raises(MissingCapabilityError):
        choose_segment_length(model, 2 * int(suggested[1]), layers, free_bytes=needed // 2)


def test_fewer_layers_are_suggested_where_their_weights_would_make_room() -> None:
    model = wide_bamba()
    shallow = estimate_memory(model, {0, 1}, depth=1)
    weights = decoder_layer_bytes(model)
    free = shallow.segmented(SEQLEN, 1024) - weights[2] - weights[3]
    with pytest.raises(MissingCapabilityError) as raised:
        choose_segment_length(model, SEQLEN, LAYERS, free_bytes=free)
    assert "--layers first:2." in raised.value.hint
    with pytest.raises(MissingCapabilityError) as raised:
        choose_segment_length(model, SEQLEN, LAYERS, free_bytes=free - 1)
    assert "--layers first:2" not in raised.value.hint
    with pytest.raises(MissingCapabilityError) as raised:
        choose_segment_length(model, SEQLEN, LAYERS, free_bytes=1000)
    assert raised.value.hint == "No --seq or --layers fits: take a smaller model."


def test_free_memory_of_the_host() -> None:
    assert 0 < host_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    model = tiny_models.shared("mamba2").base_model
    assert choose_segment_length(model, 100, tiny_models.layer_refs("mamba2")) == 100
    with pytest.raises(MissingCapabilityError, match="on cpu"):
        choose_segment_length(model, 2**40, tiny_models.layer_refs("mamba2"))


def test_ranks_share_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each rank would use half of it for captured inputs, and all of it for a model without a GPU."""
    monkeypatch.setattr(machine, "_available", lambda: 8000)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert host_memory() == free_memory(torch.device("cpu")) == 1000


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_limits_what_is_free_and_files_in_its_cache_do_not_count(
    version: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The parent group has a lower limit.  A downloaded checkpoint fills the cache up to the limit."""
    controller, prefix, limit, taken = (
        ("memory", "total_", "memory.limit_in_bytes", "memory.usage_in_bytes")
        if version == 1
        else ("", "", "memory.max", "memory.current")
    )

    def group(path: str, allowed: str, used: int, cached: int) -> None:
        folder = tmp_path / controller / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit).write_text(f"{allowed}\n")
        (folder / taken).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(
            f"{prefix}inactive_file {cached // 2}\n{prefix}active_file {cached // 2}\n{prefix}anon 1\n"
        )

    (tmp_path / "meminfo").write_text("MemFree:  1 kB\nMemAvailable:     100 kB\nHugePages_Total:  0\n")
    (tmp_path / "own").write_text(f"3:cpuset:/\n0:{controller}:/jobs/mine\n")
    monkeypatch.setattr(machine, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(machine, "_GROUPS", tmp_path)
    assert host_memory() == 100 * 1024
    group("jobs/mine", "90000" if version == 1 else "max", 60000, 0)
    assert host_memory() == (30000 if version == 1 else 100 * 1024)
    group("jobs", "80000", 79000, 28000)
    assert host_memory() == 29000
    (tmp_path / "own").write_text(f"0:{controller}:/jobs/of/another/tree\n")  # as in a container without its own view
    assert host_memory() == 29000
    (tmp_path / "own").unlink()
    assert host_memory() == 100 * 1024
