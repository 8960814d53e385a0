"""Which placement a machine's memory allows, its predicted cost, and the memory that it needs."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
import torch.nn.attention.bias
import transformers as tf
from checkpoint.folders import edit_json
from fakes import needs_two_gpus
from huggingface_hub.utils import are_progress_bars_disabled
from safetensors.torch import load_file, save_file
from targets import slow
from torch import Tensor

from ssdprof.capture.forward import PromptRun
from ssdprof.capture.intercept import OperatorCall, Result
from ssdprof.capture.layers import capture_bytes_per_token, capture_layers
from ssdprof.capture.memory import LiveBytes, predict_memory
from ssdprof.checkpoint.load import REWRITTEN
from ssdprof.checkpoint.mixers import find_mixers
from ssdprof.core.base import PlacementKind
from ssdprof.core.target import Allocation, Placement, PlannedFile, Serving
from ssdprof.core.words import placement_words
from ssdprof.environment import machine
from ssdprof.errors import BadInputError, MissingCapabilityError
from ssdprof.jobs import limits
from ssdprof.jobs import plan as placement
from ssdprof.jobs.options import ServedModelOptions
from ssdprof.jobs.plan import ChosenPlacement, check_start, choose, load, plan
from ssdprof.jobs.target import Target, find
from ssdprof.kernels.inputs import Inputs
from ssdprof.progress import Watcher

GB = 10**9
INPUTS = 2**20  # more than twice the captured inputs of a layer


@pytest.fixture(scope="session")
def granite(tmp_path_factory) -> Path:
    """A mixture of experts with layers of about 3 MB, without a tokenizer."""
    config = tiny_models.config(
        "granitemoehybrid",
        hidden_size=128,
        mamba_n_heads=4,
        intermediate_size=256,
        num_hidden_layers=6,
        num_local_experts=8,
        layer_types=["mamba", "mamba", "attention", "mamba", "mamba", "mamba"],
    )
    folder = tmp_path_factory.mktemp("granite")
    tf.GraniteMoeHybridForCausalLM(config).save_pretrained(folder)
    return folder


def asked(
    folder: Path, kind: PlacementKind | None = None, *, seqlen: int = 96, **options
) -> Target:
    return find(
        ServedModelOptions(
            model=str(folder), prompt="random", seqlens=(seqlen,), placement=kind, **options
        )
    )


def memory(monkeypatch, gpus: list[int], host: int):
    """A machine with this much free memory."""
    monkeypatch.setattr(
        limits, "device", lambda: torch.device("cuda", 0) if gpus else torch.device("cpu")
    )
    monkeypatch.setattr(limits, "free_bytes", lambda: gpus[0] if gpus else host)
    monkeypatch.setattr(placement, "free_memory", lambda device: gpus[device.index])
    monkeypatch.setattr(machine, "_available", lambda: host)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))


def beside(target: Target) -> int:
    """Bytes that the model needs in addition to its weights, as the choice counts them."""
    return placement.Chooser(target).least_bytes_beside_weights()


def memory_in_weights(monkeypatch, target: Target, gpus: list[float], host: float):
    """Free memory in units of the weights, in addition to the memory for the computation."""
    weights = target.weight_bytes
    more = beside(target)
    memory(
        monkeypatch,
        [max(int(gpu * weights) + more, 0) for gpu in gpus],
        int(host * weights) + (INPUTS if gpus else more),
    )


@pytest.mark.parametrize(
    ("gpus", "host", "kind"),
    [
        ([1.1], 4.0, "one-gpu"),
        ([0.6, 0.9], 4.0, "all-gpus"),
        ([0.6, 0.3], 4.0, "cpu-offload"),
        ([0.6, -99], 4.0, "cpu-offload"),  # filled by another process
        ([0.6, -99], 0.1, "disk-offload"),
        ([0.6, -99, 0.9], 4.0, "all-gpus"),
        ([0.6], 4.0, "cpu-offload"),
        ([0.6], 0.1, "disk-offload"),
        ([], 1.1, "one-gpu"),
        ([], 0.6, "disk-offload"),
    ],
)
def test_the_fastest_placement_that_fits(granite: Path, monkeypatch, gpus: list[float], host, kind):
    target = asked(granite)
    weights = target.weight_bytes
    memory_in_weights(monkeypatch, target, gpus, host)
    chosen = choose(target)
    record = chosen.record
    assert record.kind == kind
    assert sum(part.bytes for part in record.allocated.values()) == weights
    assert sum(part.layers for part in record.allocated.values()) == 6
    assert (record.streamed_layer_bytes > 0) == kind.endswith("offload")
    assert (chosen.device_map is None) == (kind == "one-gpu")
    room = dict(zip(("cuda:0", "cuda:1", "cuda:2"), gpus, strict=False)) or {"cpu": host}
    assert all(
        part.bytes <= room[place] * weights
        for place, part in record.allocated.items()
        if place in room
    )


def test_what_a_user_names_is_taken_or_refused(granite: Path, monkeypatch):
    memory_in_weights(monkeypatch, asked(granite), [0.5], 4)
    assert choose(asked(granite, "disk-offload")).record.kind == "disk-offload"
    refused: list[tuple[list[float], float, PlacementKind, str]] = [
        ([0.5], 4, "all-gpus", "needs two NVIDIA GPUs; 1 can be used"),
        ([0.5], 4, "one-gpu", "does not fit on cuda:0: its weights take"),
        ([0.5], 0.25, "cpu-offload", "does not fit with --placement cpu-offload"),
        ([], 4, "cpu-offload", "cpu-offload needs an NVIDIA GPU; 0 can be used"),
    ]
    for gpus, host, kind, words in refused:
        memory_in_weights(monkeypatch, asked(granite), gpus, host)
        with pytest.raises(MissingCapabilityError, match=words):
            choose(asked(granite, kind))


def test_a_second_gpu_that_another_process_has_alone_is_left_out(granite: Path, monkeypatch):
    memory_in_weights(monkeypatch, asked(granite), [0.6, 1], 4)

    def refuse(_device: torch.device) -> int:
        raise MissingCapabilityError(
            "CUDA cannot start the GPU: all CUDA-capable devices are busy or unavailable."
        )

    monkeypatch.setattr(placement, "free_memory", refuse)
    assert choose(asked(granite)).record.kind == "cpu-offload"
    with pytest.raises(
        MissingCapabilityError, match="all-gpus needs two NVIDIA GPUs; 1 can be used"
    ):
        choose(asked(granite, "all-gpus"))


def test_ranks_of_one_machine_share_its_main_memory_and_take_one_gpu_each(
    granite: Path, monkeypatch
):
    memory_in_weights(monkeypatch, asked(granite), [0.6, 4], 2)
    assert choose(asked(granite)).record.kind == "all-gpus"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert choose(asked(granite)).record.kind == "cpu-offload"
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert choose(asked(granite)).record.kind == "disk-offload"


def save_in_fp8(folder: Path):
    """Qwen3.5 with the projections of its MLPs in fp8."""
    tiny_models.shared("qwen3_5_text").save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    stored = {}
    for name, tensor in load_file(file).items():
        tensor = tensor.contiguous()
        if ".mlp." in name:
            stored |= {name: tensor.to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}
        else:
            stored[name] = tensor
    save_file(stored, file, {"format": "pt"})
    mixers = [
        f"model.layers.{layer}.{mixer}"
        for layer in range(4)
        for mixer in ("linear_attn", "self_attn")
    ]
    quantization = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": mixers,
    }
    edit_json(folder / "config.json", quantization_config=quantization)


@pytest.mark.parametrize(
    ("save", "whole"),
    [
        (lambda folder: tiny_models.shared("qwen3_next").save_pretrained(folder), False),
        (lambda folder: tiny_models.shared("granitemoehybrid").save_pretrained(folder), False),
        (save_in_fp8, True),
    ],
    ids=["experts one by one", "experts together", "fp8"],
)
def test_weights_that_transformers_writes_anew_are_counted(
    save: Callable[[Path], None], whole, tmp_path, monkeypatch
):
    """whole: all weights on the disk are rewritten, except for a few numbers of each head."""
    save(tmp_path)
    target = asked(tmp_path, "disk-offload")
    memory_in_weights(monkeypatch, target, [], 0.5)
    chosen = choose(target)
    loaded = load(target, Watcher())
    written = (
        tensor
        for file in (loaded.files.folder / REWRITTEN).iterdir()
        for tensor in load_file(file).values()
    )
    size = sum(tensor.nbytes for tensor in written)
    assert size <= chosen.rewritten_bytes <= 1.001 * size
    on_disk = chosen.record.allocated["disk"].bytes
    assert on_disk > 0
    assert (chosen.rewritten_bytes == on_disk) == whole


def test_what_cannot_work_is_told_before_the_download_and_in_a_dry_run(granite: Path, monkeypatch):
    """A tokenizer of another model, and no room for weights that are written anew."""
    monkeypatch.setattr(placement, "fetch", None)
    target = asked(granite, seqlen=256, tokenizer="demo")
    planned = plan(target)
    for refuse in (lambda: load(target, Watcher()), lambda: check_start(planned, target)):
        with pytest.raises(BadInputError, match="the model's vocabulary has 128"):
            refuse()
    target = asked(granite)
    chosen = replace(choose(target), rewritten_bytes=11 << 20)
    monkeypatch.setattr(
        placement.shutil, "disk_usage", lambda _: tf.utils.ModelOutput(free=11 << 20)
    )
    chosen.check_disk()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(placement, "choose", lambda *_: chosen)
    planned = plan(target)
    assert planned.placement is None
    for refuse in (lambda: load(target, Watcher()), lambda: check_start(planned, target)):
        with pytest.raises(MissingCapabilityError, match=r"write 22\.0 MiB") as caught:
            refuse()
        assert "TMPDIR" in caught.value.hint
    monkeypatch.setattr(placement.shutil, "disk_usage", lambda _: tf.utils.ModelOutput(free=4096))
    with pytest.raises(MissingCapabilityError, match="folder has room for 4") as caught:
        load(target, Watcher())
    assert "TMPDIR" in caught.value.hint


def test_weights_that_stay_quantised_are_not_placed(granite: Path, tmp_path):
    for file in granite.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit_json(tmp_path / "config.json", quantization_config={"quant_method": "awq"})
    weights = load_file(tmp_path / "model.safetensors")
    key = "model.layers.0.mamba.out_proj"
    del weights[f"{key}.weight"]
    codes = {f"{key}.qweight": torch.ones(32, 128, dtype=torch.int32)}
    save_file(weights | codes, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadInputError, match=r"stay quantised \(awq\)"):
        choose(asked(tmp_path, "cpu-offload"))


def test_the_price_is_measured(granite: Path, monkeypatch):
    record = Placement(
        kind="disk-offload",
        device="cuda:0",
        allocated={
            "cuda:0": Allocation(layers=1, bytes=GB),
            "disk": Allocation(layers=3, bytes=3 * GB),
        },
        predicted_peak_bytes=2 * GB,
        streamed_layer_bytes=GB,
        forward_calls=4,
    )
    monkeypatch.setattr(placement, "read_bytes_per_s", lambda _: 2e9)
    copied = []

    def copy_bytes_per_s(_, most: int) -> float:
        copied.append(most)
        return 2e9

    monkeypatch.setattr(placement, "copy_bytes_per_s", copy_bytes_per_s)
    assert "measured after the download" in placement_words(
        ChosenPlacement(record=record).priced(None)
    )
    found = ChosenPlacement(record=record).priced(granite / "model.safetensors")
    assert found.seconds_per_layer == pytest.approx(1.0)
    assert copied == [GB]  # there is room for a layer, but possibly not for more
    words = placement_words(found)
    assert "1 layer (954 MiB) on cuda:0, 3 layers (2.79 GiB) on the disk" in words
    assert "for each of 4 forward calls, in 1 s at the measured 1.0 GB/s" in words
    small = record.model_copy(
        update={
            "kind": "all-gpus",
            "allocated": {"cuda:0": Allocation(layers=1, bytes=GB)},
            "streamed_layer_bytes": 0,
        }
    )
    assert "all of it fits there, so that the other GPUs hold nothing" in placement_words(small)
    in_memory = record.model_copy(update={"allocated": {"cpu": Allocation(layers=4, bytes=4 * GB)}})
    assert ChosenPlacement(record=in_memory).priced(None).seconds_per_layer == pytest.approx(0.5)


def test_the_bars_of_downloads_are_shown(granite: Path, monkeypatch):
    hidden = []
    fetch = placement.fetch

    def noted(*given, **rest):
        hidden.append(bool(are_progress_bars_disabled()))
        return fetch(*given, **rest)

    monkeypatch.setattr(placement, "fetch", noted)
    for _ in range(2):
        load(asked(granite), Watcher())
    assert hidden == [False, False]


def test_a_file_is_read_to_know_how_fast_that_is(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(b"x" * 1_000_000)
    speed = placement.read_bytes_per_s(file)
    assert 1e3 < speed < 1e12  # also where a busy machine reads for seconds
    (tmp_path / "empty").touch()
    assert placement.read_bytes_per_s(tmp_path / "empty") is None


def test_a_run_from_the_disk_gives_the_captures_of_a_run_in_memory(granite: Path, monkeypatch):
    """The model is loaded according to the placement, while the files that it reads exist.

    Streamed weights are part of the predicted peak, together with the weights that stay in memory.
    """
    found = []
    for share in (2.0, 0.6):
        target = asked(granite)
        memory_in_weights(monkeypatch, target, [], share)
        loaded = load(target, Watcher())
        found.append([])
        loaded.run(lambda layer: found[-1].append(layer.inputs.tensors))
        assert loaded.placement.kind == ("one-gpu" if share > 1 else "disk-offload")
    assert len(found[0]) == len(found[1]) == 5
    for whole, streamed in zip(*found, strict=True):
        assert all(torch.equal(whole[name], streamed[name]) for name in whole)
    resident = sum(
        parameter.nbytes for parameter in loaded.model.parameters() if not parameter.is_meta
    )
    with LiveBytes("cpu") as counted:
        loaded.run(lambda _: None)
    assert resident == loaded.placement.allocated["cpu"].bytes
    assert loaded.placement.predicted_peak_bytes == pytest.approx(resident + counted.peak, rel=0.15)


# --- the memory that it needs


LINEAR = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 4}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
WIDE: dict[str, dict[str, Any]] = {
    "mamba2": {
        "head_dim": 64,
        "state_size": 64,
        "n_groups": 1,
        "chunk_size": 256,
        "num_hidden_layers": 2,
    },
    "granitemoehybrid": {
        "mamba_d_state": 64,
        "intermediate_size": 512,
        "num_local_experts": 8,
        "num_experts_per_tok": 6,
        "shared_intermediate_size": 256,
    },
    "bamba": {"mamba_d_state": 64, "intermediate_size": 2048},
    "qwen3_next": LINEAR
    | EXPERTS
    | {"linear_num_value_heads": 8, "head_dim": 64, "shared_expert_intermediate_size": 128},
}


def wide(name: str):
    """A config with layers so wide that activations affect the peak."""
    return tiny_models.config(name, hidden_size=256, **WIDE[name])


def measured(model, name: str, seqlen: int, segment_length: int, serving: Serving) -> int:
    """Bytes of all tensors that are alive at once while the model's operators are captured."""
    for _ in range(2):  # the first call of a mixture of experts in a process keeps more memory
        with LiveBytes("cpu") as counted:
            prompt = PromptRun(
                model,
                tiny_models.prompt(seqlen),
                serving.chunk or segment_length,
                name,
                layers_of(model, name),
                serving,
                lambda hidden: torch.zeros(*hidden.shape[:2], 128),
            )
            capture_layers(prompt, lambda _: None)
    return counted.peak


def shapes_of(name: str) -> tuple[Any, set[int]]:
    """A wide model without memory, and the layers with an operator."""
    with torch.device("meta"):
        shapes = tf.AutoModel.from_config(wide(name), dtype=torch.bfloat16).eval()
    return shapes, {site.layer_index for site in find_mixers(shapes)}


def layers_of(model, name: str):
    known = tiny_models.layer_refs(name)
    return [known[0].model_copy(update={"index": site.layer_index}) for site in find_mixers(model)]


def lower_right(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


@pytest.mark.parametrize("name", ["mamba2", *slow("granitemoehybrid", "bamba", "qwen3_next")])
@pytest.mark.parametrize(
    ("segment_length", "serving"),
    [
        (1024, Serving()),
        (256, Serving()),
        (256, Serving(chunk=256)),
        (1024, Serving(decode=1)),
        (128, Serving(packed=(128,) * 8)),
    ],
    ids=["whole", "segments", "chunks", "decode", "packed"],
)
def test_the_predicted_peak_is_that_of_a_capture(
    name, segment_length, serving: Serving, monkeypatch
):
    """The prediction runs on the meta device, without memory."""
    # torch's CausalBias cannot be constructed under a dispatch mode.
    monkeypatch.setattr(torch.nn.attention.bias, "causal_lower_right", lower_right)
    model = tf.AutoModel.from_config(wide(name), dtype=torch.bfloat16).eval()
    shapes, wanted = shapes_of(name)
    predicted, _ = predict_memory(
        shapes,
        wanted,
        seqlen=1024,
        segment_length=segment_length,
        batch=1,
        on_gpu=False,
        serving=serving,
    )
    found = measured(model, name, 1024, segment_length, serving)
    assert predicted == pytest.approx(found, rel=0.15)
    assert predicted != pytest.approx(2 * found, rel=0.15)


@pytest.mark.parametrize("name", ["granitemoehybrid", *slow("qwen3_next")])
def test_a_model_that_is_cut_before_its_first_attention_layer_builds_no_mask(name, tmp_path):
    """A mask of a segment by the prompt would have 16 GiB for a million tokens."""
    tiny_models.shared(name).save_pretrained(tmp_path)
    target = asked(tmp_path, seqlen=2048, layers="first:1", segment_length=256)
    loaded = load(target, Watcher())
    with LiveBytes("cpu") as counted:
        loaded.run(lambda _: None)
    weights = sum(weight.nbytes for weight in loaded.model.parameters())
    assert loaded.placement.predicted_peak_bytes == pytest.approx(weights + counted.peak, rel=0.05)


@pytest.mark.parametrize("segment_length", [1024, 256])
@pytest.mark.parametrize("name", ["mamba2", *slow("qwen3_next")])
def test_operator_calls_of_one_form_are_tried_once(name, segment_length, monkeypatch):
    """The predicted peak is the same as if every call were tried."""
    shapes, wanted = shapes_of(name)
    tried = []  # not the calls, because a call holds its tensors
    stand_in = OperatorCall.replacement

    def counting(call: OperatorCall) -> Result:
        tried.append(call.mixer.layer_index)
        return stand_in(call)

    monkeypatch.setattr(OperatorCall, "replacement", counting)

    def predicted() -> tuple[int, int]:
        tried.clear()
        peak, _ = predict_memory(
            shapes, wanted, seqlen=1024, segment_length=segment_length, batch=1, on_gpu=False
        )
        return peak, len(tried)

    peak, forms = predicted()
    assert forms == 1
    monkeypatch.setattr(Inputs, "form", property(lambda _: object()))
    assert predicted() == (peak, len(wanted))


def test_replaying_takes_outputs_and_states_besides_the_inputs_of_a_layer():
    """At the call, or after the prompt if its segments are collected.  A GPU's memory has
    fragments, too.
    """
    shapes, _ = shapes_of("mamba2")
    layer = 1024 * capture_bytes_per_token(find_mixers(shapes)[0])

    def peaks(segment_length: int) -> tuple[int, int]:
        return predict_memory(
            shapes, {0}, seqlen=1024, segment_length=segment_length, batch=1, on_gpu=True
        )

    capturing, replaying = peaks(64)
    assert (capturing, replaying) == (layer, int(1.3 * 7 * layer))
    capturing, replaying = peaks(1024)
    assert 7 * layer < replaying / 1.3 < capturing + 7 * layer


@pytest.mark.parametrize("kind", [None, "one-gpu"])
def test_without_a_prediction_a_model_is_placed_by_its_weights_and_that_is_told(
    kind: PlacementKind | None, granite: Path, monkeypatch
):
    def fails(*_, **__):
        raise NotImplementedError("not on meta")

    monkeypatch.setattr(placement.memory, "predict_memory", fails)
    target = asked(granite, kind)
    memory(monkeypatch, [], target.weight_bytes)
    planned = plan(target)
    assert (planned.placement.kind, planned.placement.predicted_peak_bytes) == ("one-gpu", None)
    words = (
        "The memory that is needed besides the weights is not known, because of an error: "
        "not on meta."
    )
    said = []
    watcher = SimpleNamespace(say=said.append, step=Watcher().step)
    assert load(target, watcher).segment_lengths == (96,)
    assert planned.notes[-1] == said[-1] == words


def test_segments_of_a_given_length_may_be_tried_with_less_memory(granite: Path, monkeypatch):
    target = asked(granite, "one-gpu")
    memory(monkeypatch, [], target.weight_bytes)
    with pytest.raises(MissingCapabilityError, match="what is computed for 96 tokens takes"):
        choose(target)
    assert choose(asked(granite, "one-gpu", segment_length=32)).segment_lengths == (32,)


def test_each_prompt_has_the_longest_segments_that_fit(granite: Path, monkeypatch):
    target = replace(asked(granite), seqlens=(1024, 2048, 4096))
    memory_in_weights(monkeypatch, replace(target, seqlens=(2048,)), [], 1)
    assert choose(target).segment_lengths == (1024, 2048, 2048)


def test_chunks_need_memory_for_one_of_them(granite: Path, monkeypatch):
    """Each chunk is replayed immediately.  Segments are concatenated and replayed as a whole
    prompt.
    """
    segments = asked(granite, seqlen=1024, segment_length=64)
    chunks = replace(segments, serving=Serving(chunk=64))
    memory(monkeypatch, [2**40], 2**40)
    memory(monkeypatch, [chunks.weight_bytes + beside(chunks)], 2**40)
    assert choose(segments).record.kind == "cpu-offload"
    assert choose(chunks).record.kind == "one-gpu"


# --- with GPUs

LONG = 16384


@pytest.fixture(scope="module")
def large_granite(tmp_path_factory) -> Path:
    """Layers of 0.27 GB, large enough to detect streaming."""
    config = tiny_models.config(
        "granitemoehybrid",
        hidden_size=2048,
        num_attention_heads=16,
        num_key_value_heads=4,
        mamba_n_heads=64,
        mamba_d_state=128,
        mamba_chunk_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_local_experts=32,
        num_experts_per_tok=8,
        shared_intermediate_size=1024,
        layer_types=["mamba", "mamba", "attention", *["mamba"] * 5],
    )
    folder = tmp_path_factory.mktemp("large-granite")
    tf.GraniteMoeHybridForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@contextmanager
def capped(size: int | None) -> Iterator[None]:
    """This process may allocate `size` more bytes on every GPU; None: no limit."""
    gc.collect()
    torch.cuda.empty_cache()
    devices = range(torch.cuda.device_count())
    for device in devices:
        total = torch.cuda.mem_get_info(device)[1]
        allowed = total if size is None else torch.cuda.memory_allocated(device) + size
        torch.cuda.set_per_process_memory_fraction(allowed / total, device)
    try:
        yield
    finally:
        for device in devices:
            torch.cuda.set_per_process_memory_fraction(1.0, device)


@pytest.mark.gpu
@pytest.mark.parametrize("segment_length", [LONG, LONG // 4])
@pytest.mark.parametrize("kind", ["one-gpu", "cpu-offload", "disk-offload"])
def test_the_predicted_peak_of_a_gpu(
    large_granite: Path, kind: PlacementKind, segment_length, monkeypatch
):
    """torch's count, under a cap that makes the offloads stream; on one GPU, because several would
    hold all weights.
    """
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    target = asked(large_granite, kind, seqlen=LONG, segment_length=segment_length)
    more = beside(target)
    with capped(None if kind == "one-gpu" else more + target.weight_bytes * 2 // 3):
        before = torch.cuda.memory_allocated()
        loaded = load(target, Watcher())
        torch.cuda.reset_peak_memory_stats()
        loaded.run(lambda _: None)
        peak = torch.cuda.max_memory_allocated() - before
    assert loaded.placement.kind == kind
    assert (loaded.placement.streamed_layer_bytes > 0) == (kind != "one-gpu")
    assert loaded.placement.predicted_peak_bytes == pytest.approx(peak, rel=0.15)


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.parametrize("segment_length", [LONG, LONG // 4])
def test_two_gpus_give_the_captures_of_one(large_granite: Path, segment_length):
    """The cache of every layer is on the layer's GPU."""
    found = []
    kinds: tuple[PlacementKind, ...] = ("one-gpu", "all-gpus")
    for kind in kinds:
        target = asked(large_granite, kind, seqlen=LONG, segment_length=segment_length)
        more = beside(target)
        kept = []
        with capped(None if kind == "one-gpu" else more + target.weight_bytes * 3 // 4):
            loaded = load(target, Watcher())
            loaded.run(lambda layer, kept=kept: kept.append(on_host(layer.inputs)))
        assert loaded.placement.kind == kind
        found.append(kept)
    assert len(loaded.placement.allocated) == 2
    assert len(found[0]) == len(found[1]) == 7
    for one, two in zip(*found, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)


def on_host(inputs) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in inputs.tensors.items()}


@pytest.mark.parametrize(
    ("size", "cached", "yes", "is_refused"),
    [
        (64 * 10**9, False, False, True),
        (64 * 10**9, False, True, False),
        (64 * 10**9, True, False, False),
        (2 * 10**9, False, False, False),
    ],
)
def test_a_large_download_needs_a_yes(size, cached, yes, is_refused):
    found = (PlannedFile(name="model.safetensors", size_bytes=size, cached=cached),)
    target = SimpleNamespace(
        located=SimpleNamespace(files=lambda *_, **__: found),
        deepest_layer=None,
        head=False,
        ref=SimpleNamespace(repo_id="org/model"),
        request=SimpleNamespace(yes=yes),
    )
    refused = pytest.raises(
        BadInputError, match="a download of 59", check=lambda error: "--layers" not in error.hint
    )
    with refused if is_refused else nullcontext():
        placement.refuse_large_download(target)
