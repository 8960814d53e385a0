"""Captures on disk: the data that is read equals the data that was stored, and errors name the
damage.
"""

import itertools
import json
import math
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from capture.exact import capture
from fakes import denied, disk_with_room_for
from safetensors.torch import load_file, save_file

from ssdprof.capture.layers import CapturedLayer
from ssdprof.capture.manifest import MANIFEST, is_capture
from ssdprof.capture.store import CaptureWriter, check_folder, default_folder, load
from ssdprof.core.target import Prompt, Serving, scalars_hash
from ssdprof.errors import BadInputError, MissingCapabilityError
from ssdprof.kernels.ssd.inputs import SSDInputs

LENGTH = 50


def prompt(seqlen: int = LENGTH) -> Prompt:
    return Prompt(
        kind="random", source="random ids", tokenizer="none", seqlen=seqlen, token_sha256="0" * 64
    )


def captured(name: str, dtype: torch.dtype = torch.float32) -> list[CapturedLayer]:
    return capture(name, tiny_models.prompt(LENGTH), model=tiny_models.build(name, dtype))[0]


@pytest.fixture(scope="module")
def mamba2() -> list[CapturedLayer]:
    return captured("mamba2")


def writer(folder: Path, name: str = "mamba2", **options) -> CaptureWriter:
    ref = tiny_models.checkpoint_ref(name)
    return CaptureWriter(
        folder, checkpoint=ref, prompts=[prompt()], segment_length=LENGTH, **options
    )


def write(folder: Path, *layers: CapturedLayer, **options):
    with writer(folder, **options) as out:
        for layer in layers:
            out.add(layer)


@pytest.fixture
def stored(tmp_path, mamba2: list[CapturedLayer]) -> Path:
    write(tmp_path, *mamba2)
    return tmp_path


def interrupt(folder: Path, layer: CapturedLayer):
    """Ctrl-C after the first layer."""
    with writer(folder) as out:
        out.add(layer)
        raise KeyboardInterrupt


def edit(folder: Path, change):
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def read_all(folder: Path) -> list[CapturedLayer]:
    manifest, read = load(folder)
    return [read(layer) for layer in manifest.layers]


def indices(folder: Path) -> list[int]:
    return [layer.layer.index for layer in read_all(folder)]


@pytest.mark.parametrize("name", ["nemotron_h", "bamba", "qwen3_next"])
def test_what_comes_back_is_what_was_stored(tmp_path, name):
    first, *others = captured(name, torch.bfloat16)
    layers = [replace(first, remark="Each key head was taken once."), *others]
    with pytest.raises(BadInputError, match=r"manifest\.json cannot be read: No such file"):
        load(tmp_path / "new" / "folder")
    with writer(tmp_path / "new" / "folder", name) as out:
        for layer in layers:
            out.add(layer)
        assert not load(out.folder)[0].complete
    manifest, read = load(out.folder)
    assert manifest.complete
    assert is_capture(out.folder)
    assert manifest.checkpoint == tiny_models.checkpoint_ref(name)
    assert (manifest.prompts, manifest.segment_length) == ((prompt(),), LENGTH)
    for layer, record in zip(layers, manifest.layers, strict=True):
        again = read(record)
        assert (again.layer, again.remark) == (layer.layer, layer.remark)
        assert type(again.inputs) is type(layer.inputs)
        for argument, tensor in layer.inputs.tensors.items():
            other = again.inputs.tensors[argument]
            assert (other.dtype, other.stride()) == (tensor.dtype, tensor.stride())
            assert torch.equal(other, tensor)
        if isinstance(layer.inputs, SSDInputs):
            assert isinstance(again.inputs, SSDInputs)
            assert (
                again.inputs.dt_limit
                == layer.inputs.dt_limit
                == ((0.001 if name == "nemotron_h" else 0), math.inf)
            )
            assert again.inputs.dt_softplus
        assert again.inputs.scalars == layer.inputs.scalars
    assert {file.name for file in out.folder.iterdir()} == {
        ".lock",
        MANIFEST,
        *(r.file for r in manifest.layers),
    }


def test_an_unfinished_capture_is_valid_and_replaced_and_a_complete_one_only_if_asked_for(
    tmp_path, mamba2: list[CapturedLayer]
):
    with pytest.raises(KeyboardInterrupt):
        interrupt(tmp_path, mamba2[2])
    assert not load(tmp_path)[0].complete
    assert [layer.layer for layer in read_all(tmp_path)] == [mamba2[2].layer]
    write(tmp_path, mamba2[0])
    with pytest.raises(BadInputError, match="holds a complete capture of tiny-mamba2 already"):
        write(tmp_path)
    assert indices(tmp_path) == [0]
    with pytest.raises(KeyboardInterrupt), writer(tmp_path, overwrite=True) as out:
        out.add(mamba2[1])
        assert indices(tmp_path) == [0]
        raise KeyboardInterrupt
    assert load(tmp_path)[0].complete
    assert len(list(tmp_path.iterdir())) == 3
    for left in (
        ".layer_000_seqlen_24.safetensors.1.tmp",
        ".manifest.json.2.tmp",
        "layer_009_seqlen_9.safetensors",
    ):
        (tmp_path / left).touch()
    write(tmp_path, mamba2[1], mamba2[0], overwrite=True)
    assert indices(tmp_path) == [1, 0]
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("at", range(1, 6))
def test_a_capture_that_is_killed_while_it_replaces_another_leaves_one_of_them(
    tmp_path, mamba2: list[CapturedLayer], monkeypatch, at
):
    """Whichever of its changes of the folder is the last.  The next one leaves nothing of it."""
    write(tmp_path, mamba2[0])
    count = itertools.count(1)

    def dies(change):
        return lambda *arguments, **options: (
            os._exit(9) if next(count) == at else change(*arguments, **options)
        )

    if (child := os.fork()) == 0:
        monkeypatch.setattr(Path, "replace", dies(Path.replace))
        monkeypatch.setattr(Path, "unlink", dies(Path.unlink))
        other = replace(mamba2[0], inputs=replace(mamba2[0].inputs, x=mamba2[0].inputs.values + 1))
        write(tmp_path, other, mamba2[1], overwrite=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert load(tmp_path)[0].complete
    assert indices(tmp_path) in ([0], [0, 1])
    write(tmp_path, mamba2[2], overwrite=True)
    assert len(list(tmp_path.iterdir())) == 3


def flip(at: int, of: str = "") -> Callable[[Path], object]:
    """A bit of a byte, or of one in the middle of a tensor."""

    def change(file: Path):
        content = bytearray(file.read_bytes())
        place = at
        if of:
            header = 8 + int.from_bytes(content[:8], "little")
            place = header + sum(json.loads(content[8:header])[of]["data_offsets"]) // 2
        content[place] ^= 0x40
        file.write_bytes(content)

    return change


def without_dt(file: Path):
    save_file({name: tensor for name, tensor in load_file(file).items() if name != "dt"}, file)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        *(
            (flip(0, name), f"{{file}}: the bytes of {name} are not those that were written")
            for name in ("x", "dt", "A")
        ),
        (flip(3), r"{file}"),
        (flip(12), r"{file}"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), r"{file} is damaged"),
        (Path.unlink, r"{file} is missing"),
        (without_dt, r"{file} and the manifest differ in tensor dt"),
    ],
)
def test_a_damaged_file(stored: Path, damage: Callable[[Path], object], words):
    file = stored / load(stored)[0].layers[1].file
    damage(file)
    with pytest.raises(BadInputError, match=words.format(file=file.name)):
        read_all(stored)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda layer: layer["layer"].update(operator="gdn"), "is damaged"),
        (
            lambda layer: layer["tensors"].pop("D"),
            r"safetensors and the manifest differ in tensor D",
        ),
        (
            lambda layer: layer.update(seqlen=1),
            r"manifest\.json is damaged: .*: it does not have 1 tokens",
        ),
        (
            lambda layer: layer["tensors"]["x"].update(shape=[-1] * 4),
            r"is damaged: .*shape\.0 is -1, not at",
        ),
        (
            lambda layer: layer["tensors"]["x"].update(shape=[1, LENGTH, 16, 8]),
            "x does not have the shape or dtype",
        ),
        *(
            (lambda layer, file=file: layer.update(file=file), "does not belong to it")
            for file in ("../layer.safetensors", "/etc/passwd", "a/b.safetensors")
        ),
        (
            lambda layer: layer["scalars"].update(chunk_size=64),
            "the scalars of model.layers.0.mixer are not those that",
        ),
        (lambda layer: layer["scalars"].update(chunk_size=32.0), "the scalars of"),
        (lambda layer: layer["scalars"].update(dt_softplus=1), "the scalars of"),
        (
            lambda layer: layer.pop("seqlen"),
            r"manifest\.json is damaged: layers\.0\.seqlen is missing",
        ),
    ],
)
def test_a_changed_entry_of_the_manifest(stored: Path, change: Callable[[Any], object], words):
    edit(stored, lambda manifest: change(manifest["layers"][0]))
    with pytest.raises(BadInputError, match=words):
        read_all(stored)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        *(
            (json.dumps({"version": v, "checkpoint": 1}).encode(), f"has format version {v}; this")
            for v in (0, 5, None, "1")
        ),
        (b"[]", "holds no JSON object"),
        (b"{", "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[" * 10**5, "is not valid JSON: it is nested too deeply"),
    ],
)
def test_a_damaged_manifest(stored: Path, content, words):
    (stored / MANIFEST).write_bytes(content)
    with pytest.raises(BadInputError, match=words):
        load(stored)


@pytest.mark.parametrize("opener", ["pathlib.Path.read_text", "ssdprof.capture.store.safe_open"])
def test_files_that_may_not_be_read(stored: Path, monkeypatch, opener):
    """Simulated, because root may run the tests and may read every file."""
    monkeypatch.setattr(opener, denied)
    with pytest.raises(MissingCapabilityError, match="cannot be read: Permission denied"):
        read_all(stored)


def test_a_folder_is_refused_before_a_model_is_loaded(stored: Path, monkeypatch):
    with pytest.raises(BadInputError, match="holds a complete capture"):
        check_folder(stored, overwrite=False)
    check_folder(stored, overwrite=True)
    (stored / "another_program").mkdir()
    (stored / "another_program" / MANIFEST).write_text('{"name": "an app"}')
    for overwrite in (False, True):
        with pytest.raises(BadInputError, match="is not the manifest of a capture"):
            check_folder(stored / "another_program", overwrite=overwrite)
    check_folder(stored / "new" / "folder", overwrite=False)
    (stored / "file").write_text("")
    with pytest.raises(BadInputError, match="file/inside cannot be made: a file is in its place"):
        check_folder(stored / "file" / "inside", overwrite=False)
    with pytest.raises(BadInputError, match="file/inside cannot be made"):
        write(stored / "file" / "inside")
    monkeypatch.setattr("tempfile.mkdtemp", denied)
    with pytest.raises(MissingCapabilityError, match="cannot be written: permission denied"):
        check_folder(stored / "new", overwrite=False)


def test_a_full_disk_loses_nothing(tmp_path, mamba2: list[CapturedLayer]):
    def fill():
        with writer(tmp_path) as out:
            out.add(mamba2[0])
            with disk_with_room_for(10_000):
                out.add(mamba2[1])

    with pytest.raises(
        MissingCapabilityError, match=r"layer_001_seqlen_50\.safetensors cannot be written: .*large"
    ):
        fill()
    assert not load(tmp_path)[0].complete
    assert indices(tmp_path) == [0]
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        ".lock",
        "layer_000_seqlen_50.safetensors",
        MANIFEST,
    ]


def _write_until_stopped(folder: Path, connection):
    with writer(folder):
        connection.send("writing")
        connection.recv()


def test_two_writers_in_one_folder(tmp_path, mamba2: list[CapturedLayer]):
    context = multiprocessing.get_context("fork")
    connection, of_writer = context.Pipe()
    other = context.Process(target=_write_until_stopped, args=(tmp_path, of_writer))
    other.start()
    try:
        assert connection.recv() == "writing"
        with pytest.raises(BadInputError, match="Another capture is being written to"):
            write(tmp_path)
    finally:
        connection.send("stop")
        other.join()
    write(tmp_path, mamba2[0], overwrite=True)  # the lock ended with its process
    assert load(tmp_path)[0].complete


def test_the_default_folder_is_one_per_model_layers_prompt_and_how_it_is_served(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path))
    ref = tiny_models.checkpoint_ref("mamba2")
    refs = tiny_models.layer_refs("mamba2")
    ref = ref.model_copy(update={"repo_id": "org/name", "revision": "a" * 40})
    folder = default_folder(ref, [prompt()], refs)
    assert folder == default_folder(ref, [prompt()], refs)
    assert tmp_path in folder.parents
    assert "org--name" in str(folder)
    changes: list[dict[str, object]] = [
        {"token_sha256": "1" * 64},
        {"serving": Serving(chunk=16)},
        {"serving": Serving(packed=(24, 16))},
    ]
    prompts = [[prompt().model_copy(update=change)] for change in changes]
    folders = {folder, *(default_folder(ref, several, refs) for several in prompts)}
    folders.add(default_folder(ref, [prompt()], refs[:1]))
    folders.add(default_folder(ref.model_copy(update={"revision": "b"}), [prompt()], refs))
    assert len(folders) == 6


def test_the_hash_of_scalars_does_not_depend_on_their_order():
    assert (
        scalars_hash({"a": 1, "b": 2.0})
        == scalars_hash({"b": 2.0, "a": 1})
        != scalars_hash({"a": 1, "b": 2.5})
    )
