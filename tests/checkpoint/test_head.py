"""The language model's head: from its own file, from a shard, or the embeddings."""

from pathlib import Path

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file

from ssdprof.checkpoint import fetch, load_model, locate
from ssdprof.checkpoint.head import load_head, stored_head
from ssdprof.errors import BadInputError

LENGTH = 12


@pytest.mark.parametrize("shard", ["50GB", "200KB"])
@pytest.mark.parametrize(("name", "tied"), [("qwen3_next", False), ("bamba", False), ("mamba2", True)])
def test_it_orders_tokens_as_the_model_does(name: str, tied: bool, shard: str, tmp_path: Path) -> None:
    model = tiny_models.build(name)
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    model.save_pretrained(tmp_path, max_shard_size=shard)
    located = locate(str(tmp_path))
    found = stored_head(located)
    assert (found is None) is tied
    if found:
        assert found[0] == "lm_head.weight"
        assert (tmp_path / found[1]).is_file()
        assert found[2] == 4 * tiny_models.VOCAB * 64
    base = load_model(fetch(located), device="cpu")
    ids = tiny_models.prompt(LENGTH, batch=2)
    with torch.no_grad():
        scores = load_head(located, base)(base(ids)[0][:, -1])
        expected = model(ids).logits[:, -1]
    assert scores.shape == (2, tiny_models.VOCAB)
    assert torch.equal(scores.argsort(-1), expected.argsort(-1))


def test_a_head_in_codes_is_refused(tmp_path: Path) -> None:
    model = tiny_models.build("qwen3_next")
    model.save_pretrained(tmp_path)
    located = locate(str(tmp_path))
    base = load_model(fetch(located), device="cpu")
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(BadInputError, match=r"is quantised to torch\.float8_e4m3fn, and decode steps need it"):
        load_head(located, base)
