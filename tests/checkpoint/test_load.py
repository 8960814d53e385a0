"""Checkpoints of every family through the whole stage: located, fetched, cut to a few layers,
loaded.
"""

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from checkpoint.folders import edit_json, original_state, write_original
from fakes import flip_a_bit
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from ssdprof.checkpoint.config import PICKLE
from ssdprof.checkpoint.load import check_fetch, fetch, fetch_tokenizer, load_model
from ssdprof.checkpoint.model import Model, open_model
from ssdprof.checkpoint.weights import INDEX, SINGLE, Weights
from ssdprof.errors import (
    BadInputError,
    MissingCapabilityError,
    ModelUnavailableError,
    SsdprofError,
)

Save = Callable[[str], Path]


def load(folder: Path, deepest_layer: int | None = None, **options):
    local = fetch(open_model(str(folder), **options), deepest_layer=deepest_layer)
    return load_model(local, device="cpu")


def layer_outputs(model, ids: Tensor) -> list[Tensor]:
    """The output of every decoder layer of a model with or without a head."""
    outputs = []
    layers = model.get_submodule("layers") if hasattr(model, "layers") else model.base_model.layers
    hooks = [
        layer.register_forward_hook(
            lambda _module, _args, out: outputs.append(out[0] if isinstance(out, tuple) else out)
        )
        for layer in layers
    ]
    with torch.no_grad():
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return outputs


def edit_config(folder: Path, **changes):
    edit_json(folder / "config.json", **changes)


def check_layers(model, whole, ids: Tensor):
    """The layers of a cut model compute what the first ones of the whole model do."""
    for actual, expected in zip(layer_outputs(model, ids), layer_outputs(whole, ids), strict=False):
        assert torch.equal(actual, expected)


@tiny_models.every_model
@pytest.mark.parametrize("deepest_layer", [0, None])
def test_a_cut_model_computes_what_the_whole_one_does(saved: Save, name, deepest_layer):
    located = open_model(str(saved(name)))
    local = fetch(located, deepest_layer=deepest_layer)
    model = load_model(local, device="cpu")
    check_layers(model, tiny_models.shared(name), tiny_models.prompt(40))
    assert len(model.get_submodule("layers")) == located.depth(deepest_layer)
    assert not model.training
    assert not hasattr(model, "lm_head")
    assert sum(
        t.numel() * t.element_size() for t in model.state_dict().values()
    ) == located.weight_bytes(deepest_layer)


@tiny_models.every_model
def test_a_model_with_its_head_gives_the_logits_of_the_whole_one(saved: Save, name):
    located = open_model(str(saved(name)))
    model = load_model(fetch(located, head=True), device="cpu")
    ids = tiny_models.prompt(40)
    with torch.no_grad():
        assert torch.equal(
            model(ids, use_cache=False).logits,
            tiny_models.shared(name)(ids, use_cache=False).logits,
        )
    stored = {tensor.data_ptr(): tensor.nbytes for tensor in model.state_dict().values()}
    assert sum(stored.values()) == located.weight_bytes(head=True) >= located.weight_bytes()


def test_a_shared_block_stays_shared(tmp_path):
    config = tiny_models.shared("zamba2").config.to_dict()
    # two blocks, used twice each
    kinds = ["mamba", "hybrid", "hybrid", "hybrid", "mamba", "hybrid"]
    config = {
        key: value
        for key, value in config.items()
        if key not in ("layers_block_type", "hybrid_layer_ids")
    }
    model = type(tiny_models.shared("zamba2"))(
        tiny_models.shared("zamba2").config_class(**config, layers_block_type=kinds)
    )
    model.eval().save_pretrained(tmp_path)
    for deepest_layer in (0, 3, None):
        check_layers(load(tmp_path, deepest_layer), model, tiny_models.prompt(20))


@pytest.mark.parametrize(
    ("text_type", "whole_type"), [("qwen3_5_text", "qwen3_5"), ("qwen3_5_moe_text", "qwen3_5_moe")]
)
def test_a_vision_language_repo_gives_its_language_model(
    saved: Save, tmp_path, text_type, whole_type
):
    folder = saved(text_type)
    text_config = json.loads((folder / "config.json").read_text())
    outer = {
        "model_type": whole_type,
        "dtype": "float32",
        "vision_config": {"model_type": whole_type},
    }
    (tmp_path / "config.json").write_text(json.dumps({**outer, "text_config": text_config}))
    stored = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    tensors = {
        key.replace("model.", "model.language_model.", 1)
        if key.startswith("model.")
        else key: value
        for key, value in stored.items()
    }
    tensors["model.visual.blocks.0.attn.qkv.weight"] = torch.zeros(3, 3)
    tensors["mtp.layers.0.mlp.gate_proj.weight"] = torch.zeros(3, 3)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    located = open_model(str(tmp_path))
    assert located.ref.model_type == whole_type
    assert located.ref.layers[0].name == "model.language_model.layers.0.linear_attn"
    model = load_model(fetch(located, deepest_layer=1), device="cpu")
    with_head = load_model(fetch(located, head=True), device="cpu")
    assert torch.equal(with_head.lm_head.weight, tiny_models.shared(text_type).lm_head.weight)
    assert len(model.layers) == 2
    check_layers(model, tiny_models.shared(text_type), tiny_models.prompt(20))


def test_shards_may_lie_in_a_subfolder(copied: Save):
    folder = copied("mamba2")
    index = folder / INDEX
    shards = json.loads(index.read_text())["weight_map"]
    (folder / "weights").mkdir()
    for shard in set(shards.values()):
        (folder / shard).rename(folder / "weights" / shard)
    edit_json(index, weight_map={key: f"weights/{file}" for key, file in shards.items()})
    (folder / SINGLE).touch()  # is not read
    local = fetch(open_model(str(folder)))
    model = load_model(local, device="cpu")
    check_layers(model, tiny_models.shared("mamba2"), tiny_models.prompt(40))


def test_the_view_is_links_and_goes_with_the_checkpoint(saved: Save):
    model = open_model(str(saved("granitemoehybrid")))
    local = fetch(model, deepest_layer=0)
    tokenizer = fetch_tokenizer(model)
    assert tokenizer
    folder = local.folder
    assert all(file.is_symlink() for file in local.folder.glob("*.safetensors"))
    assert not list(local.folder.rglob("*.py"))
    assert AutoTokenizer.from_pretrained(tokenizer.folder)("word5 word7")["input_ids"] == [5, 7]
    del local
    assert not folder.exists()


def test_a_tokenizer_from_another_folder(saved: Save, copied: Save):
    folder = copied("mamba2")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert fetch_tokenizer(open_model(str(folder))) is None
    located = open_model(str(folder), tokenizer=str(saved("bamba")))
    assert "tiny-bamba/tokenizer.json" in [info.name for info in located.files()]
    tokenizer = fetch_tokenizer(located)
    assert tokenizer.label == "tiny-bamba"
    assert AutoTokenizer.from_pretrained(tokenizer.folder)("word9")["input_ids"] == [9]
    (folder / "empty").mkdir()
    with pytest.raises(BadInputError, match="holds no tokenizer"):
        fetch_tokenizer(open_model(str(folder), tokenizer=str(folder / "empty")))


@pytest.mark.parametrize("limit", [[0.0, float("inf")], [0.0, {"__float__": "Infinity"}], None])
def test_every_spelling_of_no_limit_loads(copied: Save, limit):
    folder = copied("mamba2")
    edit_config(folder, time_step_limit=limit)
    assert load(folder, 0).config.time_step_limit[1] == float("inf")


@pytest.mark.parametrize(
    ("stored", "in_config"),
    [(torch.bfloat16, None), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)],
)
def test_bytes_are_those_of_the_dtype_that_weights_are_loaded_in(
    tmp_path, stored, in_config: torch.dtype | None
):
    """The config decides, even if the files differ.  Without an entry, the dtype of most of the
    weights decides.
    """
    tiny_models.build("mamba2", stored).save_pretrained(tmp_path)
    edit_config(tmp_path, dtype=in_config and str(in_config).removeprefix("torch."))
    located = open_model(str(tmp_path))
    dtype = in_config or stored
    loaded = load_model(fetch(located), device="cpu")
    assert loaded.dtype == dtype
    kept = ("A_log", "D", "dt_bias")  # as stored
    weights = dict(loaded.named_parameters())
    assert {w.dtype for name, w in weights.items() if not name.endswith(kept)} == {dtype}
    assert (
        located.weight_bytes()
        == sum(weight.nbytes for weight in located.cut_on_meta().parameters())
        == sum(weight.numel() for weight in weights.values()) * dtype.itemsize
    )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.int64])
def test_codes_without_a_quantisation_in_the_config_are_no_weights(tmp_path, dtype):
    tiny_models.shared("qwen3_5_text").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    key = "model.layers.2.mlp.up_proj.weight"
    save_file({**(state := load_file(file)), key: state[key].to(dtype)}, file, {"format": "pt"})
    for read in (fetch, check_fetch):
        with pytest.raises(
            BadInputError, match=r"layers\.2\.mlp\.up_proj.* its config names no quantisation"
        ):
            read(open_model(str(tmp_path)))
        read(open_model(str(tmp_path)), deepest_layer=1)
    edit_config(
        tmp_path, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": False}
    )
    with pytest.raises(BadInputError, match="'bitsandbytes', which ssdprof cannot load"):
        open_model(str(tmp_path)).cut_on_meta()


@pytest.mark.parametrize(
    ("quantization", "kind", "words"),
    [
        (
            {"quant_method": "fbgemm_fp8"},
            MissingCapabilityError,
            "cannot load that here: Using fbgemm fp8",
        ),
        ({"quant_method": "gptq"}, BadInputError, r"quantization_config of .*'bits'"),
    ],
)
def test_a_quantisation_that_cannot_be_loaded_here_is_refused_before_the_download(
    copied: Save, monkeypatch, quantization, kind: type[SsdprofError], words
):
    folder = copied("qwen3_5_text")
    edit_config(folder, quantization_config=quantization)
    located = open_model(str(folder))
    _ = located.weights  # reads the index
    monkeypatch.setattr(Weights, "has_codes", True)
    monkeypatch.setattr(located.source, "path", None)  # no other file is fetched from it
    for read in (fetch, Model.cut_on_meta):
        with pytest.raises(kind, match=words):
            read(located)


@pytest.mark.parametrize("suffix", ["scale", "scale_inv"])
def test_weights_of_mxfp8_are_decoded(tmp_path, suffix):
    tiny_models.shared("qwen3_5_text").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    key = "model.layers.0.mlp.gate_proj.weight"
    scale = torch.full((96, 2), 125, dtype=torch.uint8)  # exponents of 2 for 32 values of a row
    coded = {key: torch.full((96, 64), 2.0).to(torch.float8_e4m3fn), f"{key}_{suffix}": scale}
    save_file({**load_file(file), **coded}, file, {"format": "pt"})
    kept = ["linear_attn", "self_attn", "up_proj", "down_proj", "layers.1", "layers.2", "layers.3"]
    quantization = {
        "quant_method": "mxfp8",
        "weight_block_size": [1, 32],
        "modules_to_not_convert": kept,
    }
    edit_config(tmp_path, quantization_config=quantization)
    located = open_model(str(tmp_path))
    assert located.ref.quantization == "mxfp8"
    weight = (
        load_model(fetch(located, deepest_layer=0), device="cpu").layers[0].mlp.gate_proj.weight
    )
    assert torch.equal(weight.float(), torch.full((96, 64), 0.5))


# --- files that do not match


@pytest.mark.parametrize(
    ("change", "deepest_layer", "words"),
    [
        ({"intermediate_size": 2**24 - 1}, 1, r"_proj.weight' is .* in the file and \(.*16777215"),
        ({"vocab_size": 2**24}, 1, r"embed_tokens.weight' is .* in the file and \(16777216, 64\)"),
        ({"num_hidden_layers": 200}, 100, r"lacks \d+ weights, such as layers\.10\."),
        ({"intermediate_size": 32}, None, "do not fit its config"),
        (
            {"rms_norm_eps": "small"},
            None,
            r"cannot use the config .*rms_norm_eps.* expected float, got str",
        ),
    ],
)
def test_a_config_that_does_not_fit_is_refused_in_a_dry_run_too(
    copied: Save, change, deepest_layer, words
):
    folder = copied("falcon_h1")
    edit_config(folder, **change)
    for read in (load, lambda folder, deepest: check_fetch(open_model(str(folder)), deepest)):
        with pytest.raises((BadInputError, ModelUnavailableError), match=words):
            read(folder, deepest_layer)


# --- the original format


@pytest.fixture
def original_folder(tmp_path) -> Path:
    write_original(tmp_path, original_state(), PICKLE)
    return tmp_path


def open_original(folder: Path) -> Model:
    return open_model(str(folder), tokenizer="demo")


@pytest.mark.parametrize("form", [PICKLE, SINGLE, INDEX])
@pytest.mark.parametrize("deepest_layer", [0, None])
def test_the_original_format_loads(original_folder: Path, form, deepest_layer):
    write_original(original_folder, original_state(), form)
    located = open_original(original_folder)
    assert located.ref.model_type == "mamba2"
    assert located.files()[1].name == form
    local = fetch(located, deepest_layer=deepest_layer)
    model = load_model(local, device="cpu", dtype=torch.float32)
    expected = tiny_models.build("mamba2", torch.float16).float().backbone
    for layer in model.layers:
        layer.mixer.A_log = expected.layers[layer.layer_idx].mixer.A_log = (
            tiny_models.shared("mamba2").backbone.layers[layer.layer_idx].mixer.A_log
        )
    assert len(model.layers) == (1 if deepest_layer == 0 else 3)
    for name, value in model.state_dict().items():
        if not name.endswith(("D", "dt_bias")):
            assert torch.equal(value, expected.state_dict()[name]), name


@pytest.mark.parametrize("tied", [True, False])
def test_the_original_format_loads_with_its_head(original_folder: Path, tied):
    """If the head is the embedding, checkpoints may or may not contain it."""
    edit_config(original_folder, tie_embeddings=tied)
    state = original_state()
    head = state["backbone.embedding.weight" if tied else "lm_head.weight"]
    if tied:
        state.pop("lm_head.weight", None)
    torch.save(state, original_folder / PICKLE)
    model = load_model(fetch(open_original(original_folder), head=True), device="cpu")
    for name, weight in model.named_parameters():  # as stored, a few numbers of each head in fp32
        kept = state[name.replace(".embeddings.", ".embedding.")]
        assert (weight.dtype, torch.equal(weight, kept)) == (kept.dtype, True), name
    assert torch.equal(model.lm_head.weight, head)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied


@pytest.mark.parametrize("form", [PICKLE, SINGLE])
@pytest.mark.parametrize("deepest_layer", [0, None])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_dtype_of_the_original_format_is_known_before_it_is_loaded(
    original_folder: Path, form, deepest_layer, dtype
):
    """The config does not have it.  A few numbers of each head keep their stored dtype."""
    state = {key: value.to(dtype) for key, value in original_state().items()}
    write_original(original_folder, state, form)
    located = open_original(original_folder)
    loaded = load_model(fetch(located, deepest_layer=deepest_layer), device="cpu")
    planned = located.cut_on_meta(deepest_layer=deepest_layer)
    assert [w.nbytes for w in planned.parameters()] == [w.nbytes for w in loaded.parameters()]


@dataclass
class Malicious:
    """A pickle of it creates `trace` when it is executed."""

    trace: Path

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self.trace),)


def test_a_pickle_that_would_run_code_is_refused(original_folder: Path):
    trace = original_folder / "executed"
    torch.save({"backbone.embedding.weight": Malicious(trace)}, original_folder / PICKLE)
    with pytest.raises(BadInputError, match="was not executed"):
        load(original_folder, tokenizer="demo")
    assert not trace.exists()


A_LOG = "backbone.layers.0.mixer.A_log"


def in_archive(program: bytes) -> Callable[[Path], object]:
    def write(file: Path):
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", program)
            archive.writestr("archive/version", "3\n")

    return write


def larger_storage(file: Path):
    """The pickled size of a storage is larger than the storage."""
    with zipfile.ZipFile(file) as source:
        contents = {name: source.read(name) for name in source.namelist()}
    sizes = b"M" + (64 * 128).to_bytes(2, "little"), b"M" + (65 * 128).to_bytes(2, "little")
    with zipfile.ZipFile(file, "w") as target:
        for name, content in contents.items():
            target.writestr(name, content.replace(*sizes) if name.endswith("data.pkl") else content)


def changed(change: Callable[[Tensor], Any]) -> Callable[[Path], object]:
    return lambda file: torch.save(
        original_state() | {A_LOG: change(original_state()[A_LOG])}, file
    )


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        *(
            (changed(change), "holds 'backbone.layers.0.mixer.A_log', which is no table of floats")
            for change in (
                Tensor.bool,
                Tensor.long,
                lambda tensor: tensor.to(torch.complex64),
                lambda tensor: tensor.to("meta"),
                Tensor.to_sparse,
                lambda tensor: [tensor],
            )
        ),
        (
            changed(lambda tensor: tensor.to(torch.float8_e4m3fn)),
            "stores codes, such as 'backbone.layers.0.mixer.A_log' in torch.float8_e4m3fn",
        ),
        (flip_a_bit, r"truncated or corrupt .*: the checksum of pytorch_model/data/\d+ differs"),
        (larger_storage, "truncated or corrupt .*: record size"),
        (lambda file: file.write_bytes(file.read_bytes()[:5000]), "truncated or corrupt"),
        (lambda file: file.write_bytes(pickle.dumps(Malicious(file))), "truncated or corrupt"),
        *(
            (way, f"{PICKLE} is truncated or corrupt")
            for program in (b"", b"h\x05.")
            for way in (
                in_archive(program),
                lambda file, program=program: file.write_bytes(program),
            )
        ),
    ],
)
def test_a_pickle_is_a_table_of_floats(
    original_folder: Path, damage: Callable[[Path], object], words
):
    """In a dry run, too, which loads no values."""
    damage(original_folder / PICKLE)
    model = open_original(original_folder)
    for read in (lambda: load_model(fetch(model), device="cpu"), lambda: check_fetch(model)):
        with pytest.raises(SsdprofError, match=words) as caught:
            read()
        assert caught.value.exit_code == (4 if "corrupt" in words else 2)


@pytest.mark.parametrize("change", [{"d_model": 128}, {"n_layer": 4}, {"vocab_size": 10**6}])
def test_an_original_config_that_is_not_its_weights(original_folder: Path, change):
    edit_config(original_folder, **change)
    with pytest.raises(
        (BadInputError, ModelUnavailableError), match=r"do not fit its config|lacks"
    ):
        load(original_folder, tokenizer="demo")
