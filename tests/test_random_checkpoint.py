"""A checkpoint of random weights has the real model's dimensions and is marked, and runs report the
mark.
"""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import environment
from make_random_checkpoint import main, write_checkpoint
from random_models import GRANITE_SMALL, MODELS, Mamba2
from transformers import AutoModelForCausalLM

from ssdprof.capture.intercept import OperatorCall, Result, intercept
from ssdprof.checkpoint.mixers import find_mixers
from ssdprof.checkpoint.model import open_model
from ssdprof.checkpoint.names import KNOWN
from ssdprof.core.target import CheckpointRef, Prompt
from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.store.header import draft

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "make_random_checkpoint.py"
PROMPT = Prompt(kind="default", source="", tokenizer="", seqlen=16, token_sha256="")
REPOS = {
    "granite-4.0-h-1b": "ibm-granite/granite-4.0-h-1b",
    "granite-4.0-h-small": "ibm-granite/granite-4.0-h-small",
    "mamba2-2.7b": "state-spaces/mamba2-2.7b",
    "qwen3.5-9b": "Qwen/Qwen3.5-9B",
    "olmo-hybrid-7b": "allenai/Olmo-Hybrid-7B",
}
NARROW = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 24, "vocab_size": 256, "pad_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip


def notes_of(ref: CheckpointRef) -> tuple[str, ...]:
    header = draft(
        kind="run",
        target="m",
        model=ref,
        environment=environment(),
        prompts=(PROMPT,),
        baseline="unfused",
    )
    return header.notes


@pytest.mark.slow
def test_random_weights_are_named_in_the_notes(tmp_path: Path):
    folder = tmp_path / "random"
    subprocess.run(
        [sys.executable, SCRIPT, "granite-4.0-h-1b", folder, "--layers", "1"], check=True
    )
    ref = open_model(str(folder)).ref
    assert [layer.index for layer in ref.layers] == [0]
    assert any("The weights are random" in note for note in notes_of(ref))


def test_trained_weights_are_not():
    assert not any("random" in note for note in notes_of(open_model("demo").ref))


@pytest.mark.parametrize("name", MODELS)
def test_its_dimensions_are_the_real_models(name: str, tmp_path: Path):
    written = MODELS[name]
    real = KNOWN[REPOS[name].casefold()]
    (tmp_path / "config.json").write_text(json.dumps(written.config(written.depth)))
    model = open_model(str(tmp_path))
    assert model.sizes(model.layers[0]) == real.dims
    assert (len(model.layers), model.layer_count) == (real.operator_layers, real.layers)


@pytest.fixture(params=["qwen3.5-9b", "olmo-hybrid-7b"])
def narrow(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from the script, with the model's first four layers at a small width."""
    model = MODELS[request.param]
    small = dataclasses.replace(model, dimensions=model.dimensions | NARROW)
    monkeypatch.setitem(MODELS, request.param, small)
    folder = tmp_path / request.param
    monkeypatch.setattr(
        sys, "argv", ["make_random_checkpoint", request.param, str(folder), "--layers", "4"]
    )
    main()
    return folder


def test_stock_transformers_loads_every_weight_of_a_mixture_of_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    small = dataclasses.replace(
        GRANITE_SMALL,
        hidden=64,
        heads=4,
        kv_heads=2,
        mlp=32,
        mixer=Mamba2(hidden=64, nheads=2),
        experts=4,
        chosen=2,
        expert=16,
        vocabulary=256,
        attention_layers=(1,),
    )
    monkeypatch.setitem(MODELS, "granite-4.0-h-small", small)
    write_checkpoint("granite-4.0-h-small", tmp_path, 3, 0, "cpu")
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype="auto", output_loading_info=True
    )
    assert not any(info.values()), info
    assert [layer.index for layer in open_model(str(tmp_path)).ref.layers] == [0, 2]
    with torch.no_grad():
        hidden = model.base_model(torch.arange(64)[None], output_hidden_states=True).hidden_states
    scales = [float(one.float().std()) for one in hidden]
    assert all(0.3 < scale < 3 for scale in scales), scales


def test_stock_transformers_loads_every_weight_of_a_gdn_model(narrow: Path):
    model, info = AutoModelForCausalLM.from_pretrained(
        narrow, dtype="auto", output_loading_info=True
    )
    assert not any(info.values()), info
    assert model.dtype == torch.bfloat16
    assert [layer.index for layer in open_model(str(narrow)).ref.layers] == [0, 1, 2]


def test_the_operators_inputs_have_a_trained_models_scales(narrow: Path):
    model = AutoModelForCausalLM.from_pretrained(narrow, dtype=torch.float32).eval()
    seen = []

    def observe(call: OperatorCall) -> Result:
        assert isinstance(call.inputs, GDNInputs)
        seen.append(call.inputs)
        return call.run_original()

    ids = torch.randint(256, (1, 512), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), intercept(find_mixers(model), observe):
        logits = model(ids, use_cache=False).logits
    assert logits.isfinite().all()
    assert len(seen) == 3
    largest_beta = 2 if "olmo" in narrow.name else 1
    for inputs in seen:
        assert 0.2 < float(inputs.v.std()) < 5
        decays = inputs.g.exp()
        assert decays.median() > 0.5  # a step forgets a part of the state
        assert decays.min() < 0.9
        assert inputs.beta.min() < 0.3 * largest_beta
        assert 0.7 * largest_beta < inputs.beta.max() <= largest_beta


def test_too_few_layers_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Olmo-Hybrid's definition requires an attention layer, and the first one is the fourth
    layer.
    """
    monkeypatch.setattr(
        "sys.argv", ["make", "olmo-hybrid-7b", str(tmp_path / "few"), "--layers", "3"]
    )
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "--layers must be from 4 to 32, not 3" in capsys.readouterr().err
    assert not (tmp_path / "few").exists()
