"""What a machine can process, decided only from sizes."""

import pytest
import torch

from ssdprof.errors import MissingCapabilityError
from ssdprof.jobs import limits


def test_the_interpreter_takes_short_prompts_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "device", lambda: torch.device("cpu"))
    limits.check_replay((16, limits.LONGEST_INTERPRETED))
    for seqlens, batch in (
        ((16, limits.LONGEST_INTERPRETED + 1), 1),
        ((limits.LONGEST_INTERPRETED // 2,), 3),
    ):
        with pytest.raises(MissingCapabilityError, match="interpreter") as caught:
            limits.check_replay(seqlens, batch)
        assert (
            caught.value.hint
            == "Use a shorter --seq, or fewer or shorter sequences: 2,048 tokens together."
        )
    monkeypatch.setattr(limits, "device", lambda: torch.device("cuda", 0))
    limits.check_replay((131072,))


def test_running_out_of_memory_says_what_to_do():
    with (
        pytest.raises(MissingCapabilityError, match="Tried to allocate") as caught,
        limits.memory_errors(),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    assert "--seq" in caught.value.hint
    assert "more" not in caught.value.message
