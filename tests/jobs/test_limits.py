"""What a machine can process, decided only from sizes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ssdprof.core.subject import LayerRef
from ssdprof.errors import MissingCapabilityError
from ssdprof.jobs import limits

GB = 10**9


def subject(repo_id: str, gb_per_layer: float, wanted: int = 4) -> Any:
    """The first `wanted` layers of a checkpoint of four; the weights grow with the deepest one."""
    layers = tuple(LayerRef(index=i, name=f"model.layers.{i}.mamba", operator="ssd") for i in range(4))

    def weight_bytes(deepest: int, dtype: object) -> int:  # noqa: ARG001
        return int((deepest + 1) * gb_per_layer * GB)

    return SimpleNamespace(
        ref=SimpleNamespace(repo_id=repo_id, layers=layers),
        located=SimpleNamespace(weight_bytes=weight_bytes),
        weight_bytes=int(wanted * gb_per_layer * GB),
        whole=False,
        dtype=None,
    )


def test_too_large_a_member_of_a_family_names_layers_and_siblings_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "free_bytes", lambda: 80 * GB)
    limits.check_weights(subject("org/name", 20))
    with pytest.raises(MissingCapabilityError) as caught:
        limits.check_weights(subject("ibm-granite/granite-4.0-h-small", 30))
    assert "120,000,000,000 bytes" in caught.value.message
    assert "--layers first:2 fits" in caught.value.hint
    assert "ibm-granite/granite-4.0-h-tiny" in caught.value.hint
    assert "granite-4.0-h-small" not in caught.value.hint
    limits.check_weights(subject("ibm-granite/granite-4.0-h-small", 30, wanted=2))
    with pytest.raises(MissingCapabilityError) as caught:
        limits.check_weights(subject("org/name", 90))
    assert "Not one layer" in caught.value.hint


def test_the_interpreter_takes_short_prompts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "device", lambda: torch.device("cpu"))
    limits.check_replay((16, limits.LONGEST_INTERPRETED))
    for seqlens, batch in (((16, limits.LONGEST_INTERPRETED + 1), 1), ((limits.LONGEST_INTERPRETED // 2,), 3)):
        with pytest.raises(MissingCapabilityError, match="interpreter") as caught:
            limits.check_replay(seqlens, batch)
        assert caught.value.hint == "Use a shorter --seq, or fewer or shorter sequences: 2,048 tokens together."
    monkeypatch.setattr(limits, "device", lambda: torch.device("cuda", 0))
    limits.check_replay((131072,))


def test_running_out_of_memory_says_what_to_do() -> None:
    with pytest.raises(MissingCapabilityError, match="Tried to allocate") as caught, limits.memory_errors():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    assert "--seq" in caught.value.hint
    assert "more" not in caught.value.message
