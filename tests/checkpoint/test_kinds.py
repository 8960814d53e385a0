"""Kinds of checkpoints that people have: each loads with the right weights, or is refused with the
true reason.
"""

import errno
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import tiny_models
import torch
import transformers as tf
from checkpoint.folders import ORIGINAL_CONFIG, edit_json, write_original
from command_line import Answer, ending
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from targets import slow
from torch import Tensor

from ssdprof.checkpoint.config import PICKLE
from ssdprof.checkpoint.load import fetch, infer_devices, load_model
from ssdprof.checkpoint.model import open_model
from ssdprof.checkpoint.weights import INDEX
from ssdprof.core.report import Report
from ssdprof.errors import BadInputError, MissingCapabilityError
from ssdprof.store import reports

pytestmark = pytest.mark.usefixtures("in_empty_folder")
Weights = dict[str, Tensor]
Change = Callable[[Weights], Weights]
GDN = ("qwen3_5_text", "qwen3_next", "olmo_hybrid")
SSD = ("granitemoehybrid", "bamba", "nemotron_h", "falcon_h1", "zamba2")


def checkpoint(name: str = "qwen3_5_text", **config) -> Path:
    """A saved tiny model in bf16, whose config has other entries."""
    folder = Path(name)
    tiny_models.build(name, torch.bfloat16).save_pretrained(folder)
    edit_json(folder / "config.json", **config)
    return folder


def rewrite(folder: Path, change: Change):
    file = folder / "model.safetensors"
    save_file(
        {key: weight.contiguous() for key, weight in change(load_file(file)).items()},
        file,
        metadata={"format": "pt"},
    )


def renamed(before: str, after: str) -> Change:
    return lambda weights: {key.replace(before, after, 1): w for key, w in weights.items()}


def without(part: str, **more: Tensor) -> Change:
    """The weights whose names do not contain `part`, and more."""
    return lambda weights: {key: w for key, w in weights.items() if part not in key} | more


def packed(weights: Weights) -> Weights:
    """Some of the weights as codes in 8 bit."""
    return {key: w.to(torch.uint8) if "in_proj_qkv" in key else w for key, w in weights.items()}


def loaded(folder: Path, *, head: bool = False) -> Weights:
    return load_model(fetch(open_model(str(folder)), head=head), device="cpu").state_dict()


def check_loaded(folder: Path, expected: Weights, *, head: bool = False):
    weights = loaded(folder, head=head)
    assert weights.keys() == expected.keys()
    for key, weight in weights.items():
        assert torch.equal(weight, expected[key]), key


PROMPT = "--prompt random --seq 24"


def run(folder: Path, *options: str, code: int = 0) -> tuple[Answer, Report | None]:
    words = f"{PROMPT} --layers first:1 --dtypes exact --out run"
    answer = ending(code, f"run {folder}", words, *options)
    return answer, reports.load("run")[1] if Path("run").exists() else None


def refusal(folder: Path, *options: str, code: int = 2) -> str:
    """The error of a run that is refused."""
    return run(folder, *options, code=code)[0].err


def check_predictions_refused(folder: Path, words: str, code: int = 2):
    """Each command that needs the head is refused with these words."""
    for command in ("answers", "run --decode 1"):
        answer = ending(code, command, str(folder), PROMPT)
        assert words in answer.err
        assert "damaged" not in answer.err


def with_exact_gates(
    name: str, dtype: torch.dtype = torch.float32
) -> tuple[Path, dict[tuple[str, str], Tensor]]:
    """A checkpoint whose gates alone are stored in fp32; by layer and name.  transformers renames
    some of them.
    """
    folder = checkpoint(name)
    exact = {}

    def in_fp32(weights: Weights) -> Weights:
        for key in weights:
            layer, _, leaf = key[key.find("layers.") :].removeprefix("layers.").partition(".")
            leaf = leaf.rpartition(".")[2]
            if leaf in ("A_log", "D", "dt_bias"):
                exact[layer, leaf] = torch.rand(weights[key].shape)
                weights[key] = exact[layer, leaf].to(dtype)
        return weights

    rewrite(folder, in_fp32)
    assert exact
    return folder, exact


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *slow(*((name, torch.float32) for name in tiny_models.MODELS)),
        ("qwen3_5_text", torch.float64),
        ("kimi_linear", torch.float64),
    ],
)
def test_parameters_of_operators_keep_fp32(name, dtype):
    folder, exact = with_exact_gates(name, dtype)
    weights = loaded(folder)
    for (layer, leaf), gate in exact.items():
        (key,) = (
            key for key in weights if f"layers.{layer}." in key and key.rpartition(".")[2] == leaf
        )
        assert torch.equal(weights[key], gate), key
    assert {w.dtype for key, w in weights.items() if key.endswith("norm.weight")} == {
        torch.bfloat16
    }


@pytest.mark.parametrize("name", ["granitemoehybrid", "kimi_linear"])
def test_parameters_on_the_disk_keep_fp32(name):
    folder, _ = with_exact_gates(name)
    located = open_model(str(folder))
    local = fetch(located)
    empty = located.cut_on_meta()
    layers = [sum(weight.nbytes for weight in layer.parameters()) for layer in empty.layers]
    room = empty.get_input_embeddings().weight.nbytes + layers[0] + max(layers)
    places = infer_devices(empty, {"cpu": room, "disk": 0})
    ids = torch.arange(40)[None]
    with torch.no_grad():
        whole, streamed = (
            load_model(local, device="cpu", device_map=device_map)(ids).last_hidden_state
            for device_map in (None, places)
        )
        rewrite(folder, lambda weights: {key: w.bfloat16() for key, w in weights.items()})
        rounded = load_model(fetch(open_model(str(folder))), device="cpu")(ids).last_hidden_state
    assert torch.equal(streamed, whole)
    assert not torch.equal(rounded, whole)


def in_two_files(folder: Path, later: Weights, *, named: bool = True):
    """Layer 0 is in a first file, by the index; a second file has the rest and `later` copies."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {"a.safetensors": {key: w for key, w in weights.items() if "layers.0." in key}}
    files["b.safetensors"] = without("layers.0.")(weights)
    places = {key: file for file, tensors in files.items() for key in tensors}
    for key in () if named else later:
        del places[key]
    for file, tensors in (("a.safetensors", {}), ("b.safetensors", later)):
        save_file(files[file] | tensors, folder / file, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.mark.parametrize("rows", [1, 2])
def test_the_index_says_which_copy_of_a_tensor_counts(monkeypatch, rows):
    """Copies of another shape must not count in sizes either."""
    folder = checkpoint()
    expected = loaded(folder)
    weights = load_file(folder / "model.safetensors")
    size = open_model(str(folder)).weight_bytes()
    later = {
        key: torch.full_like(weight, 3.0).repeat(rows, *[1] * (weight.ndim - 1))
        for key, weight in weights.items()
        if "layers.0.linear_attn" in key
    }
    in_two_files(folder, later)
    check_loaded(folder, expected)
    assert open_model(str(folder)).weight_bytes() == size
    # safetensors' error for a full disk
    monkeypatch.setattr("ssdprof.checkpoint.load.save_file", Mock(side_effect=SafetensorError))
    with pytest.raises(MissingCapabilityError, match="temporary folder"):
        loaded(folder)


def test_an_index_counts_before_a_single_file():
    """As in vLLM and SGLang.  Names may begin with "./"."""
    folder = checkpoint()
    expected = loaded(folder)
    single = folder / "model.safetensors"
    later = {key: torch.full_like(weight, 3.0) for key, weight in load_file(single).items()}
    in_two_files(folder, {})
    index = folder / INDEX
    places = json.loads(index.read_text())["weight_map"].items()
    mixed = {key: "./" * (number % 2) + file for number, (key, file) in enumerate(places)}
    index.write_text(json.dumps({"weight_map": mixed}))
    save_file(later, single)
    check_loaded(folder, expected)
    answer, _ = run(folder, "--full")
    caveat = f"model.safetensors of qwen3_5_text is not read: {INDEX} places"
    assert caveat in answer.err
    assert caveat in answer.shown
    (folder / "b.safetensors").unlink()
    assert loaded(folder)["embed_tokens.weight"].eq(3).all()


def test_two_copies_of_which_the_index_names_none_are_refused():
    folder = checkpoint()
    key = "model.layers.0.linear_attn.A_log"
    in_two_files(folder, {key: torch.ones(4)}, named=False)
    assert f"a.safetensors and b.safetensors both hold '{key}'" in refusal(folder, "--dry-run")


@pytest.mark.parametrize(
    ("name", "change", "code", "words"),
    [
        ("qwen3_5_text", without("0.linear_attn.A_log"), 4, "lacks layers.0.linear_attn.A_log "),
        ("qwen3_5_text", without("embed_tokens.weight"), 4, "lacks embed_tokens.weight among its "),
        (
            "qwen3_5_text",
            renamed("layers.", "h."),
            2,
            "has 'model.h.0.input_layernorm.weight', not layers.0.input_layernorm.weight: it has "
            "the names of another library",
        ),
        (
            "kimi_linear",
            without("layers.0.self_attn.A_log", **{"model.extra.weight": torch.ones(99, 99)}),
            4,
            "lacks layers.0.self_attn.forget_gate.A_log ",
        ),
        (
            "qwen3_5_text",
            lambda weights: weights | {"model.embed_tokens.weight": torch.ones(99, 64)},
            2,
            "'model.embed_tokens.weight' is (99, 64) in the file and (128, 64) by the config",
        ),
        (
            "qwen3_5_text",
            lambda weights: weights | {"norm.weight": torch.ones(64)},
            2,
            "two weights for norm.weight: 'model.norm.weight' and 'norm.weight'.",
        ),
        (
            "qwen3_5_text",
            without("0.mlp.up_proj", **{"draft.layers.0.mlp.up_proj.weight": torch.ones(96, 64)}),
            2,
            "has 'draft.layers.0.mlp.up_proj.weight', not layers.0.mlp.up_proj.weight: ",
        ),
        (
            "qwen3_5_text",
            lambda weights: {
                f"{text}.{k}": 1 * w for k, w in weights.items() for text in ("a", "b")
            },
            2,
            "has 'a.model.layers.0.input_layernorm.weight', not layers.0.input_layernorm.weight: ",
        ),
        (
            "qwen3_5_text",
            renamed("layers.0.linear_attn.", "layers.0.inner.linear_attn."),
            2,
            "has 'model.layers.0.inner.linear_attn.A_log', not layers.0.linear_attn.A_log: it was "
            "saved in a wrapper, or belongs to another model.",
        ),
    ],
)
@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_the_weight_that_does_not_fit_is_named(name, change: Change, code, words, options):
    folder = checkpoint(name)
    rewrite(folder, change)
    assert words in refusal(folder, *options, code=code)


def test_a_file_beside_the_index_is_named():
    folder = checkpoint()
    in_two_files(folder, {})
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    kept = {key: file for key, file in places.items() if file == "b.safetensors"}
    edit_json(folder / INDEX, weight_map=kept)
    assert "The index does not name a.safetensors." in refusal(folder, code=4)
    (folder / INDEX).unlink()
    (folder / "b.safetensors").rename(folder / "model.safetensors")
    assert "index" not in refusal(folder, code=4)


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize(
    "wrapped",
    [
        r"layers.\1._checkpoint_wrapped_module.",
        r"_orig_mod.layers.\1._orig_mod.",
        r"_fsdp_wrapped_module.layers.\1._fsdp_wrapped_module._checkpoint_wrapped_module.",
    ],
)
@pytest.mark.parametrize("name", ["qwen3_5_text", *slow("kimi_linear")])
def test_names_that_wrappers_put_into_keys(name, wrapped, head):
    folder = checkpoint(name)
    expected = loaded(folder, head=head)
    rewrite(
        folder,
        lambda weights: {re.sub(r"layers\.(\d+)\.", wrapped, key): w for key, w in weights.items()},
    )
    check_loaded(folder, expected, head=head)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float8_e4m3fn])
def test_what_is_no_weight_may_be_stored_in_anything(dtype):
    folder = checkpoint("granitemoehybrid")
    expected = loaded(folder)
    extra = {
        "model.layers.0.mamba.in_proj._extra_state": torch.ones(8, dtype=torch.uint8).to(dtype),
        "model.layers.1.attention_mask.bias": torch.ones(8).to(dtype),
    }
    rewrite(folder, lambda weights: weights | extra)
    check_loaded(folder, expected)


def test_gptq_of_the_old_kind_is_named():
    folder = checkpoint()
    key = "model.layers.0.linear_attn.out_proj"
    codes = {
        f"{key}.qweight": torch.ones(8, 64, dtype=torch.int32),
        f"{key}.scales": torch.ones(64),
    }
    rewrite(folder, without("layers.0.linear_attn.out_proj.weight", **codes))
    for described in ("", "; quantize_config.json does, in a format that ssdprof cannot load"):
        if described:
            (folder / "quantize_config.json").write_text('{"bits": 4, "group_size": 128}')
        words = f"'{key}.qweight' in I32, and its config names no quantisation{described}."
        assert words in refusal(folder)


@pytest.mark.parametrize(
    ("file", "left"),
    [
        *(
            ("config.json", {"quantization_config": {"quant_method": method, "bits": 4}})
            for method in ("fp8", "gptq", "bitsandbytes", "modelopt", "made_up")
        ),
        ("config.json", {"quantization": {"group_size": 64, "bits": 4}}),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}),
    ],
)
def test_a_quantisation_that_only_the_config_has_left_is_none(file, left):
    folder = checkpoint()
    expected = loaded(folder)
    edit_json(folder / file, **left)
    check_loaded(folder, expected)
    assert open_model(str(folder)).ref.quantization is None


@pytest.mark.parametrize("files", [(), ("config.json",)])
def test_checkpoints_of_a_training_run_are_named(files):
    for step in (200, 1000):
        folder = Path("training") / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    for file in files:
        Path(checkpoint() / file).rename(Path("training") / file)
    hint = "Name a checkpoint inside: training/checkpoint-1000, training/checkpoint-200."
    assert hint in refusal(Path("training"))


def test_a_pickle_keyed_by_numbers_is_refused():
    write_original(Path(), {0: torch.ones(4), "x": torch.ones(4)}, PICKLE)
    edit_json(Path("config.json"), vocab_size=256)
    words = "holds an entry 0, which is no name of a weight"
    assert words in refusal(Path(), "--tokenizer demo")


def test_a_model_without_a_causal_class_has_no_answers(monkeypatch):
    folder = checkpoint()
    monkeypatch.delitem(tf.MODEL_FOR_CAUSAL_LM_MAPPING._model_mapping, "qwen3_5_text")
    check_predictions_refused(
        folder, "has no causal language model for qwen3_5_text, only its layers."
    )
    run(folder)


@pytest.mark.parametrize(
    ("weight", "part"),
    [("lm_head.weight", "head, lm_head, gives"), ("layers.1.mlp.up", "layers give")],
)
def test_a_model_that_is_not_finite_itself_blames_no_implementation(weight, part):
    folder = checkpoint(tie_word_embeddings=False)

    def broken(weights: Weights) -> Weights:
        for key, values in weights.items():
            if weight in key:
                values[-1] = float("nan")
        return weights

    rewrite(folder, broken)
    answer = ending(2, f"answers {folder} {PROMPT} --impl unfused --dtypes exact")
    assert f"The model's {part} NaN or infinity at position 0 with the reference itself" in (
        answer.err
    )
    assert "it is not the implementations" in answer.err


def test_a_full_temporary_folder_is_no_damage(monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = open_model("demo")
    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    with pytest.raises(MissingCapabilityError) as caught:
        model.cut_on_meta(deepest_layer=0)
    assert caught.value.hint == "Make room there or set TMPDIR to another folder."


@pytest.mark.parametrize(
    "file",
    [
        "tiktoken.model",
        *slow("tekken.json", "tokenization_x.py", "source.spm", "inner/tokenizer.json"),
    ],
)
def test_a_tokenizer_that_is_not_read_is_named(file):
    folder = checkpoint()
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text("")
    answer = ending(2, f"run {folder} --seq 16")
    assert f"of a kind that ssdprof does not read: {file}; it runs no remote code." in answer.err
    run(folder)  # of random tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SSD, *GDN])
def test_models_decode_with_parameters_in_fp32(name):
    folder = checkpoint(name)
    kept = ("A_log", "D", "dt_bias")
    rewrite(
        folder,
        lambda weights: {key: w.float() if key.endswith(kept) else w for key, w in weights.items()},
    )
    run(folder, "--decode 2")


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        *slow(("", "_orig_mod."), ("", "module."), ("", "model._orig_mod.")),
        ("model.", "model.language_model.model."),
    ],
)
def test_keys_with_foreign_prefixes_load_or_are_named(before, after, head):
    folder = checkpoint()
    expected = loaded(folder, head=head)
    rewrite(folder, renamed(before, after))
    if head and not before:  # the head has the prefix, too
        answer = Answer(f"answers {folder} {PROMPT} --dry-run")
        assert answer.code in (0, 2, 4)
        if answer.code:
            assert "lm_head.weight" in answer.err
            return
    check_loaded(folder, expected, head=head)


def test_an_adapter_is_named_and_never_silent():
    config = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": 4}
    Path("alone").mkdir()
    for folder in (Path("alone"), checkpoint()):
        (folder / "adapter_config.json").write_text(json.dumps(config))
        save_file(
            {"base_model.model.layers.0.lora_A.weight": torch.ones(1)},
            folder / "adapter_model.safetensors",
        )
    error = refusal(Path("alone"), "--dry-run")
    assert "alone is a LoRA adapter for 'org/base' (adapter_config.json)." in error
    assert "Merge it into its base model first." in error
    (Path("alone") / "adapter_config.json").write_text("{")
    (Path("alone") / "modeling.py").touch()
    assert "alone is a LoRA adapter for another model." in Answer("capture alone").err
    answer, report = run(Path("qwen3_5_text"))
    words = "adapter_model.safetensors of qwen3_5_text is not applied"
    assert words in answer.err
    assert any(words in note for note in report.notes)
    rewrite(Path("qwen3_5_text"), renamed("in_proj_qkv.weight", "in_proj_qkv.base_layer.weight"))
    answer = ending(2, f"capture qwen3_5_text {PROMPT} --dry-run")
    assert "base_layer.weight', not" in answer.err
    assert "an adapter was not merged" in answer.err


@pytest.mark.parametrize(
    ("key", "tied"),
    [("score.weight", True), *slow(("classifier.weight", False), ("model.score.weight", True))],
)
def test_a_classifier_predicts_no_tokens(key, tied):
    folder = checkpoint(tie_word_embeddings=tied)
    rewrite(folder, without("lm_head", **{key: torch.ones(2, 64)}))
    check_predictions_refused(folder, f"is a classifier, with '{key}' and no lm_head.weight")
    run(folder)  # its operators are measured


def test_a_lost_head_is_named():
    folder = checkpoint(tie_word_embeddings=False)
    rewrite(folder, without("lm_head"))
    check_predictions_refused(folder, "qwen3_5_text lacks lm_head.weight ", 4)


@pytest.mark.parametrize(("outer", "inner"), [(True, False), (True, True), (None, True)])
def test_the_outer_config_decides_whether_the_head_is_the_embedding(outer: bool | None, inner):
    folder = checkpoint()
    text = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": inner}
    outside = {} if outer is None else {"tie_word_embeddings": outer}
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen3_5", "text_config": text, **outside})
    )
    rewrite(folder, renamed("model.", "model.language_model."))
    rewrite(folder, without("lm_head"))
    weights = loaded(folder, head=True)
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize(
    "value", ["flash_attention_2", "flash_attention_3", "made_up", {"": "flash_attention_2"}]
)
def test_the_attention_of_a_config_need_not_be_installed(key, value):
    run(checkpoint(**{key: value}), "--dry-run")


@pytest.mark.parametrize("where", ["quantization", "quantization_config"])
@pytest.mark.parametrize("bits", [4, 8])
def test_mlx_is_named(where, bits):
    folder = checkpoint(**{where: {"group_size": 64, "bits": bits}})
    rewrite(folder, packed)
    words = f"is of MLX's format, with {bits} bits in groups of 64"
    assert words in refusal(folder, "--dry-run")


def check_decoded(folder: Path, decoded: Weights):
    weights = loaded(folder)
    assert decoded
    for key, weight in decoded.items():
        assert torch.equal(weights[key.removeprefix("model.")], weight), key


@pytest.mark.parametrize(("hidden", "block"), [(80, 32), (96, 64), (72, 128), (64, 32)])
def test_blocks_of_fp8_may_be_cut_off(hidden, block):
    """96 in blocks of 64 would divide into two blocks of 48: equal blocks give wrong weights
    without an error.
    """
    folder = Path("fp8")
    model = tiny_models.build("qwen3_5_text", torch.bfloat16, hidden_size=hidden)
    model.save_pretrained(folder)
    decoded = {}
    kept = []

    def encoded(weights: Weights) -> Weights:
        stored = {}
        for key, weight in weights.items():
            if "layers." not in key or weight.ndim != 2 or "in_proj_a" in key or "in_proj_b" in key:
                stored[key] = weight
                kept.append(key.removesuffix(".weight"))
                continue
            rows, columns = weight.shape
            scales = torch.rand(-(-rows // block), -(-columns // block)) + 0.5
            codes = weight.float().to(torch.float8_e4m3fn)
            wide = scales.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[
                :, :columns
            ]
            decoded[key] = (codes.float() * wide).to(torch.bfloat16)
            stored |= {key: codes, f"{key}_scale_inv": scales}
        return stored

    rewrite(folder, encoded)
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
        "modules_to_not_convert": kept,
    }
    edit_json(folder / "config.json", quantization_config=quantization)
    check_decoded(folder, decoded)


def write_modelopt(folder: Path, file: str, codes: dict[str, str]):
    """Describe the weights as NVIDIA's tool does, in the config or in a file beside it."""
    if file == "config.json":
        edit_json(folder / file, quantization_config={"quant_method": "modelopt", **codes})
    else:
        edit_json(folder / file, producer={"name": "modelopt"}, quantization=codes)


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json"])
def test_fp8_of_modelopt_has_a_scale_for_each_tensor(file):
    folder = checkpoint()
    decoded = {}

    def encoded(weights: Weights) -> Weights:
        stored = dict(weights)
        for key, weight in weights.items():
            if "layers." in key and weight.ndim == 2 and "in_proj_a" not in key:
                stored[key] = (16 * weight.float()).to(torch.float8_e4m3fn)
                scale = torch.rand(()) + 0.5
                stored[f"{key}_scale"] = scale
                stored[key.replace("weight", "input_scale")] = torch.ones(())
                decoded[key] = (stored[key].float() * scale).to(torch.bfloat16)
        return stored

    rewrite(folder, encoded)
    write_modelopt(folder, file, {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"})
    check_decoded(folder, decoded)
    assert open_model(str(folder)).quantization == "fp8"


@pytest.mark.parametrize(
    ("part", "codes", "scale"),
    [
        ("mamba.in_proj", "float8_e4m3fn", None),
        ("mamba.in_proj", "float8_e4m3fn", (3,)),
        ("mamba.in_proj", "uint8", ()),
        # transformers renames this weight, but not its scale
        ("block_sparse_moe.router.layer", "float8_e4m3fn", ()),
    ],
)
def test_codes_without_a_scale_are_refused(part, codes, scale: tuple[int, ...] | None):
    folder = checkpoint("granitemoehybrid")
    weight = f"model.layers.0.{part}.weight"
    scales = {} if scale is None else {f"{weight}_scale": torch.ones(scale)}
    rewrite(
        folder,
        lambda weights: {**weights, weight: weights[weight].to(getattr(torch, codes)), **scales},
    )
    described = {"quant_algo": "FP8", "quant_method": "awq"}
    write_modelopt(folder, "hf_quant_config.json", described)
    error = refusal(folder, "--dry-run")
    assert f"{weight}' in" in error
    assert "and has no fp8 scale with which transformers decodes it." in error


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json"])
@pytest.mark.parametrize("algorithm", ["NVFP4", "MIXED_PRECISION", "FP8_PER_CHANNEL_PER_TOKEN"])
def test_other_formats_of_modelopt_are_refused_by_name(file, algorithm):
    folder = checkpoint()
    write_modelopt(folder, file, {"quant_algo": algorithm})
    rewrite(folder, packed)
    words = f"qwen3_5_text is quantised by 'modelopt' as {algorithm!r}, which ssdprof cannot load"
    assert words in refusal(folder, "--dry-run")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {
                "rmsnorm": True,
                "D_has_hdim": False,
                "norm_before_gate": False,
                "bias": False,
                "conv_bias": True,
                "dt_limit": [0.0, 1e30],
                "A_init_range": [1, 16],
                "use_mem_eff_path": True,
                "d_ssm": None,
            },
            "",
        ),
        ({"D_has_hdim": True}, "has 'D_has_hdim' = True in ssm_cfg"),
        ({"rmsnorm": False}, "has 'rmsnorm' = False in ssm_cfg"),
        ({"d_ssm": 64}, "has 'd_ssm' = 64 in ssm_cfg"),
        ({"heads": 1}, "has 'heads' = 1 in ssm_cfg"),
    ],
)
def test_options_of_original_mamba2(change, words):
    folder = checkpoint("mamba2")
    ssm = ORIGINAL_CONFIG["ssm_cfg"] | change
    (folder / "config.json").write_text(json.dumps(ORIGINAL_CONFIG | {"ssm_cfg": ssm}))
    rewrite(folder, renamed("embeddings.", "embedding."))
    if words:
        with pytest.raises(BadInputError, match=re.escape(words)):
            open_model(str(folder))
    else:
        assert load_model(
            fetch(open_model(str(folder), tokenizer="demo")), device="cpu"
        ).state_dict()


def test_a_type_that_nobody_listed_works():
    """As in the next release of transformers: a wrapper with its language model in another config,
    of a new type.
    """
    file = Path("modeling_made_up.py").absolute()
    source = Path(sys.modules[tf.Qwen3_5TextModel.__module__].__file__ or "").read_text()
    file.write_text(
        source.replace("from ... import", "from transformers import")
        .replace("from ...", "from transformers.")
        .replace("from ..", "from transformers.models.")
        .replace("from .", "from transformers.models.qwen3_5.")
    )
    spec = importlib.util.spec_from_file_location(
        "transformers.models.qwen3_5.modeling_made_up", file
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    config = type("MadeUpConfig", (tf.Qwen3_5TextConfig,), {"model_type": "made_up"})
    made_up = type(
        "MadeUp",
        (module.Qwen3_5TextModel,),
        {"config_class": config, "__module__": module.__name__},
    )
    tf.AutoConfig.register("made_up", config)
    tf.AutoModel.register(config, made_up)
    folder = checkpoint()
    text = json.loads((folder / "config.json").read_text()) | {"model_type": "made_up"}
    rewrite(folder, renamed("model.", "thinker.text."))
    for key in ("text_config", "llm_config", "writer_config"):
        (folder / "config.json").write_text(
            json.dumps({"model_type": "made_up_omni", key: text, "audio_config": {}})
        )
        _, report = run(folder)
        assert (report.model.model_type, len(report.model.layers)) == ("made_up_omni", 3)
        Answer("runs")
        shutil.rmtree("run")
