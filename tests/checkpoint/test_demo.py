"""The demo models are small, load anywhere, and have the accuracy that their cards state."""

import json
import math
import re
from pathlib import Path
from typing import Any

import bits_per_byte
import pytest
import torch
import train_demo
from safetensors.torch import load_file
from targets import slow
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as modeling

from ssdprof.capture.intercept import OperatorCall, Result, intercept
from ssdprof.capture.prompt import held_out_text, training_text
from ssdprof.checkpoint.mixers import find_mixers
from ssdprof.checkpoint.names import DEMO_FOLDERS
from ssdprof.kernels.gdn.inputs import GDNInputs

Loaded = tuple[Any, dict[str, Any]]  # a model, and what loading it has missed
SLICE = 16384  # bytes of held-out text; the whole text takes too long here


@pytest.fixture(scope="module", params=DEMO_FOLDERS)
def demo(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(demo: str) -> Path:
    return DEMO_FOLDERS[demo]


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Loaded:
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    return model.eval(), info


def documents(demo: str) -> tuple[tuple[Path, str], ...]:
    """The files that state a model's accuracy, and the beginnings of their tables' rows."""
    return (Path(__file__).parents[2] / "docs" / "demo-model.md", f"{demo}, "), (
        DEMO_FOLDERS[demo] / "README.md",
        "",
    )


def stated(document: Path, row: str) -> list[float]:
    """The numbers of the table row that starts with `row`."""
    (line,) = re.findall(rf"^\| {re.escape(row)} \|(.*)$", document.read_text(), re.MULTILINE)
    return [float(number) for number in re.findall(r"\d+\.\d+", line)]


def test_it_is_small_and_has_the_files_of_a_hub_repository(folder: Path):
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    assert sum(sizes.values()) <= 3_000_000
    assert {
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= set(sizes)


def test_stock_transformers_loads_every_weight(folder: Path, loaded: Loaded):
    model, info = loaded
    assert not any(info.values()), info
    stored = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    for name, tensor in stored.items():
        assert torch.equal(model.get_parameter(name), tensor.float()), name


def test_the_gdn_demo_shares_keys_and_has_wider_values():
    config = json.loads((DEMO_FOLDERS["demo-gdn"] / "config.json").read_text())
    assert config["linear_num_value_heads"] == 2 * config["linear_num_key_heads"]
    assert config["linear_value_head_dim"] == 2 * config["linear_key_head_dim"]


def test_the_gates_of_the_gdn_demo_have_learnt():
    """In every layer, one head forgets within bytes, another one remembers for longer, and beta
    uses its range.
    """
    model = AutoModelForCausalLM.from_pretrained(
        DEMO_FOLDERS["demo-gdn"], dtype=torch.float32
    ).eval()
    seen: list[GDNInputs] = []

    def observe(call: OperatorCall) -> Result:
        seen.append(call.inputs)
        return call.run_original()

    with torch.no_grad(), intercept(find_mixers(model), observe):
        model(torch.tensor([list(held_out_text()[:2048])]), use_cache=False)
    assert len(seen) == 3
    for inputs in seen:
        half_lives = math.log(2) / -inputs.g[0].mean(0)
        assert half_lives.min() < 5
        assert half_lives.max() > 10
        low, high = inputs.beta.float().quantile(torch.tensor([0.01, 0.99]))
        assert high - low > 0.5


def test_its_token_ids_are_bytes(folder: Path):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sample = (
        "".join(chr(point) for point in (*range(0x100), 0x20AC, 0x1F600)) + "plain words\r\n\ttoo"
    )
    ids = tokenizer(sample)["input_ids"]
    assert ids == list(sample.encode())
    assert tokenizer.decode(ids) == sample
    assert sorted(tokenizer.get_vocab().values()) == list(range(256))


@pytest.mark.parametrize(
    ("dtype", "length"),
    [(torch.bfloat16, 1024), *slow((torch.bfloat16, 4096), (torch.float32, 4096))],
)
def test_its_logits_are_finite(folder: Path, loaded: Loaded, dtype, length):
    model = (
        loaded[0]
        if dtype == torch.float32
        else AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    )
    assert model.dtype == dtype
    with torch.no_grad():
        logits = model(torch.tensor([list(held_out_text()[:length])]), use_cache=False).logits
    assert logits.shape == (1, length, 256)
    assert logits.isfinite().all()


@pytest.mark.slow
def test_it_is_clearly_better_than_a_bigram_on_text_it_never_saw(demo: str, loaded: Loaded):
    held_out = held_out_text()[:SLICE]
    bits = bits_per_byte.model_bits_per_byte(loaded[0], held_out)
    bigram = bits_per_byte.best_bigram_bits_per_byte(training_text(), held_out)
    assert bits < bigram - 1
    for document, row in documents(demo):
        assert stated(document, f"{row}first 16,384 bytes") == pytest.approx(
            [bits, bigram], abs=0.002
        )


def test_the_bigram_model_is_right_on_a_text_worked_by_hand():
    # In "aaba", a is followed once by a and once by b, and b once by a; add one: p(a) = 4/260, p(b)
    # = 2/260.
    b_after_a = (1 + 2 * 2 / 260) / (2 + 2)
    a_after_b = (1 + 2 * 4 / 260) / (1 + 2)
    expected = -(math.log2(b_after_a) + math.log2(a_after_b)) / 2
    assert bits_per_byte.bigram_bits_per_byte(b"aaba", b"aba", prior=2) == pytest.approx(expected)


def test_the_operator_used_in_training_is_that_of_transformers():
    x = torch.randn(2, 192, 4, 8)
    dt = torch.randn(2, 192, 4)
    B, C = torch.randn(2, 2, 192, 1, 16)
    parameters = {"D": torch.randn(4), "dt_bias": torch.randn(4)}
    A = -torch.randn(4).exp()
    expected = modeling.mamba2_chunk_scan(
        x, dt, A, B, C, chunk_size=32, dt_softplus=True, **parameters
    )
    torch.testing.assert_close(
        train_demo.ssd(x, dt, A, B, C, **parameters), expected, rtol=1e-4, atol=1e-4
    )
