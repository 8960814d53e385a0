"""The real huggingface_hub client with a hub on localhost: the fetched files, and every kind of
failure.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoint.folders import original_state, write_original
from huggingface_hub import constants
from minihub import TOKEN, MiniHub
from torchrun import MODULE, python

from ssdprof.checkpoint import hub as hub_module
from ssdprof.checkpoint.config import DEFAULT_TOKENIZER, PICKLE
from ssdprof.checkpoint.load import LocalCheckpoint, fetch, fetch_tokenizer, load_model
from ssdprof.checkpoint.model import Model, open_model
from ssdprof.checkpoint.weights import INDEX, SINGLE
from ssdprof.errors import ExitCode, MissingCapabilityError, ModelUnavailableError, SsdprofError
from ssdprof.jobs.options import ServedModelOptions
from ssdprof.jobs.plan import check_start, plan
from ssdprof.jobs.target import find

Save = Callable[[str], Path]


def fetch_all(located: Model, deepest_layer: int | None = None) -> LocalCheckpoint:
    """Fetches as a run does."""
    fetch_tokenizer(located)
    return fetch(located, deepest_layer=deepest_layer)


def failure(model: str, **options: str) -> SsdprofError:
    with pytest.raises(SsdprofError) as caught:
        fetch(open_model(model, **options))
    assert caught.value.hint
    return caught.value


@pytest.fixture
def tiny_hub(hub: MiniHub, saved: Save) -> MiniHub:
    """A hub with the repo org/tiny."""
    hub.publish("org/tiny", saved("mamba2"))
    return hub


# --- what is fetched


def test_only_the_needed_files_are_fetched_and_only_once(hub: MiniHub, copied: Save):
    folder = copied("granitemoehybrid")
    others = (
        "pytorch_model.bin",
        "consolidated.safetensors",
        "tokenizer.model.v3",
        "README.md",
        "model.gguf",
    )
    for name in others:
        (folder / name).write_bytes(b"not wanted")
    commit = hub.publish("org/tiny", folder)
    located = open_model("org/tiny")
    assert hub.downloads() == ["config.json"]
    assert (located.ref.source, located.ref.repo_id, located.ref.revision) == (
        "hub",
        "org/tiny",
        commit,
    )

    planned = located.files(0)
    assert not {info.name for info in planned} & {*others, "modeling_tiny.py"}
    assert not [info for info in planned if info.name.endswith(".safetensors") and info.cached]
    assert {info.name: info.size_bytes for info in planned} == {
        info.name: (folder / info.name).stat().st_size for info in planned
    }
    lines = []
    fetch_tokenizer(located)
    local = fetch(located, deepest_layer=0, progress=lines.append)
    assert len(lines) == 1
    assert "org/tiny" in lines[0]
    assert sorted(hub.downloads()) == sorted(info.name for info in planned)
    shards = json.loads((folder / INDEX).read_text())["weight_map"]
    unneeded = set(shards.values()) - {info.name for info in planned}
    assert unneeded
    assert len(load_model(local, device="cpu").layers) == 1

    hub.log.clear()
    again = open_model("org/tiny")
    assert all(info.cached for info in again.files(0))
    fetch(again, deepest_layer=0, progress=lines.append)
    assert hub.downloads() == []
    assert len(lines) == 1


def test_the_bytes_of_weights_are_known_without_a_download(hub: MiniHub, copied: Save):
    folder = copied("granitemoehybrid")
    (folder / "empty.txt").touch()
    hub.publish("org/tiny", folder)
    assert hub_module.HubRepo("org/tiny").sizes["empty.txt"] == 0
    located = open_model("org/tiny")
    assert located.weight_bytes(1) == open_model(str(folder)).weight_bytes(1)
    parts = [request for request in hub.log if request.range is not None]
    assert parts
    assert not any(info.cached for info in located.files(1) if info.name.endswith(".safetensors"))


def test_a_symlink_keeps_its_name(saved: Save, tmp_path):
    (tmp_path / "my-model").symlink_to(saved("mamba2").resolve())
    assert open_model(str(tmp_path / "my-model")).ref.repo_id == "my-model"


def test_a_revision_is_resolved_once_and_stays(tiny_hub: MiniHub, saved: Save, copied: Save):
    commit = tiny_hub.publish("org/tiny", copied("mamba2"), revision="v1")
    located = open_model("org/tiny", revision="v1")
    assert located.ref.revision == commit
    # the branch moves on; the run does not
    tiny_hub.publish("org/tiny", saved("bamba"), revision="v1")
    assert fetch(located).model.model_type == "mamba2"
    assert open_model("org/tiny", revision=commit).ref.revision == commit
    by_branch = [request for request in tiny_hub.log if "/resolve/v1/" in request.path]
    assert len(by_branch) == 3  # for config.json: a check that the hub answers, then HEAD and GET


def test_a_family_name_takes_its_flagship_and_says_so(hub: MiniHub, saved: Save):
    hub.publish("ibm-granite/granite-4.0-h-small", saved("granitemoehybrid"))
    located = open_model("ibm-granite/granite-4.0")
    assert located.ref.requested == "ibm-granite/granite-4.0"
    assert located.ref.repo_id == "ibm-granite/granite-4.0-h-small"
    assert "ibm-granite/granite-4.0-h-tiny" in located.ref.siblings
    assert "taking ibm-granite/granite-4.0-h-small" in located.notes[0]
    assert open_model("ibm-granite/granite-4.0-h-small").ref.siblings == ()


def test_the_trained_context_is_the_tables_where_it_knows_better(hub: MiniHub, saved: Save):
    hub.publish("ibm-ai-platform/Bamba-9B", saved("bamba"))
    hub.publish("org/tiny", saved("bamba"))
    assert open_model("ibm-ai-platform/Bamba-9B").ref.trained_context == 4096
    assert open_model("org/tiny").ref.trained_context == 262144  # max_position_embeddings


def test_the_original_format_from_its_safetensors_revision(hub: MiniHub, saved: Save, tmp_path):
    hub.publish(DEFAULT_TOKENIZER, saved("bamba"))
    for form, revision in ((PICKLE, "main"), (SINGLE, "refs/pr/1")):
        folder = tmp_path / form
        folder.mkdir()
        write_original(folder, original_state(), form)
        hub.publish("state-spaces/mamba2-130m", folder, revision=revision)

    names = [info.name for info in open_model("state-spaces/mamba2-130m").files()]
    assert PICKLE in names
    assert f"{DEFAULT_TOKENIZER}/tokenizer.json" in names
    located = open_model("state-spaces/mamba2-130m", revision="refs/pr/1")
    tokenizer = fetch_tokenizer(located)
    local = fetch(located)
    assert (local.folder / SINGLE).is_symlink()
    assert tokenizer.label == DEFAULT_TOKENIZER
    assert local.model.ref.trained_context == 2048
    assert PICKLE not in hub.downloads()


# --- interrupted


def test_a_broken_connection_continues_where_it_broke(tiny_hub: MiniHub, monkeypatch):
    # the client keeps whole chunks, by default of 10 MB
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)
    located = open_model("org/tiny")
    shard = next(info for info in located.files(0) if info.name.endswith(".safetensors"))
    assert located.weight_bytes(0)  # from the headers
    tiny_hub.log.clear()
    tiny_hub.cut(shard.name, 1200)
    local = fetch(located, deepest_layer=0)
    ranges = [
        request.range
        for request in tiny_hub.log
        if request.path.endswith(shard.name) and request.method == "GET"
    ]
    assert ranges == [None, "bytes=1000-"]
    load_model(local, device="cpu")


@pytest.mark.parametrize("at", ["config", "listing", "header", "shard"])
def test_a_connection_that_drops_between_requests(tiny_hub: MiniHub, monkeypatch, at):
    """As with keep-alive connections: the server closes the connection instead of answering."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    tiny_hub.drops = at == "config"
    repo = hub_module.HubRepo("org/tiny")
    tiny_hub.drops = at == "listing"
    shard = min(name for name in repo.sizes if name.endswith(".safetensors"))
    assert repo.complete
    tiny_hub.drops = 2 * (at == "header")
    assert repo.header(shard)
    tiny_hub.drops = 2 * (at == "shard")
    assert repo.path(shard).stat().st_size == repo.sizes[shard]
    assert tiny_hub.drops == 0


def test_a_connection_that_keeps_dropping_ends(tiny_hub: MiniHub, monkeypatch):
    pauses = []
    monkeypatch.setattr("time.sleep", pauses.append)
    repo = hub_module.HubRepo("org/tiny")
    tiny_hub.drops = 1000
    with pytest.raises(
        ModelUnavailableError, match="The connection to the hub broke while org/tiny was fetched: "
    ):
        repo.path("model.safetensors.index.json")
    assert pauses.count(hub_module.PAUSE_S) == hub_module.ATTEMPTS - 1


@pytest.mark.usefixtures("tiny_hub")
def test_what_the_hub_said_of_a_file_does_not_vouch_for_the_copy():
    located = open_model("org/tiny")
    assert located.weight_bytes(0) > 0  # reads the headers on the hub
    shard = next(info.name for info in located.files(0) if info.name.endswith(".safetensors"))
    copy = located.source.path(shard).resolve()
    copy.write_bytes(copy.read_bytes()[:-1])
    with pytest.raises(ModelUnavailableError, match="truncated or corrupt") as caught:
        fetch(located, deepest_layer=0)
    assert str(copy) in caught.value.hint  # without its link, the client would link it again


def test_too_little_disk_is_said_before_the_download(tiny_hub: MiniHub, monkeypatch):
    target = find(ServedModelOptions(model="org/tiny", seqlens=(64,), prompt="random"))
    planned = plan(target)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=planned.download_bytes))
    check_start(planned, target)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10_000))
    for start in (lambda: check_start(planned, target), lambda: fetch(target.located)):
        with pytest.raises(MissingCapabilityError, match="hub cache's disk") as caught:
            start()
        assert "HF_HOME" in caught.value.hint
    fetched = [
        request.path for request in tiny_hub.log if request.method == "GET" and not request.range
    ]
    assert not [path for path in fetched if path.endswith(".safetensors")]


# --- unavailable


@pytest.mark.usefixtures("hub")
def test_a_missing_repo_names_known_ones_like_it():
    for name, words in (
        ("org/nothing", "hf auth login"),
        ("ibm-granite/granite-4.0-h-tinny", "ibm-granite/granite-4.0-h-tiny"),
    ):
        error = failure(name)
        assert error.exit_code == ExitCode.MODEL_UNAVAILABLE
        assert f"There is no repo {name}" in error.message
        assert words in error.hint


@pytest.mark.parametrize(
    ("way", "message", "words", "not_allowed"),
    [
        ("private", "or it is private", "hf auth login", "the token's account"),
        (
            "gated",
            "gated: its owner must grant you access, and you are not logged in",
            "/org/one",
            "not on the list",
        ),
    ],
)
def test_a_repo_that_needs_a_token(
    hub: MiniHub, saved: Save, monkeypatch, way, message, words, not_allowed
):
    hub.publish("org/one", saved("mamba2"), private=way == "private", gated=way == "gated")
    error = failure("org/one")
    assert (error.exit_code, message in error.message, words in error.hint) == (4, True, True), (
        error
    )
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    error = failure("org/one")
    assert not_allowed in error.message + error.hint
    assert "hf_wrong" not in str(vars(error))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert fetch(open_model("org/one")).model.source.label == "org/one"


def test_an_unknown_revision_names_those_there_are(tiny_hub: MiniHub, saved: Save):
    tiny_hub.publish("org/tiny", saved("bamba"), revision="v2")
    error = failure("org/tiny", revision="v9")
    assert error.exit_code == ExitCode.MODEL_UNAVAILABLE
    assert "'v9'" in error.message
    assert error.hint == "Branches and tags: main, v2."


@pytest.mark.parametrize("name", ["org/name/more", "org/na me", "a" * 300, "-x", "org/..", "", " "])
def test_what_is_no_hub_id_is_refused_without_a_request(hub: MiniHub, name):
    assert failure(name).exit_code == ExitCode.BAD_INPUT
    assert hub.log == []


def cut_shard(folder: Path):
    shard = min(folder.glob("model-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        (
            lambda folder: (folder / "config.json").rename(folder / "model.gguf"),
            2,
            "repos with only GGUF files",
        ),
        (cut_shard, 4, "model-00001-of-"),
        (lambda folder: min(folder.glob("model-*")).unlink(), 4, "is incomplete at this revision"),
    ],
)
def test_what_is_wrong_on_the_hub(
    hub: MiniHub, copied: Save, damage: Callable[[Path], object], code, words
):
    folder = copied("mamba2")
    damage(folder)
    hub.publish("org/bad", folder)
    error = failure("org/bad")
    assert (error.exit_code, words in error.message + error.hint) == (code, True), error


# --- out of reach


def test_offline_runs_from_the_cache_and_names_it(hub: MiniHub, saved: Save, monkeypatch):
    commit = hub.publish("org/tiny", saved("mamba2"))
    hub.publish("org/other", saved("bamba"))
    fetch_all(open_model("org/tiny"), deepest_layer=0)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.log.clear()
    located = open_model("org/tiny")
    assert located.ref.revision == commit
    load_model(fetch_all(located, deepest_layer=0), device="cpu")
    assert hub.log == []

    error = failure("org/other")
    assert error.exit_code == ExitCode.MODEL_UNAVAILABLE
    assert "HF_HUB_OFFLINE is set" in error.message
    assert error.hint == "Unset HF_HUB_OFFLINE, or use a model in the cache: org/tiny."

    # the other layers were never fetched, and a single file does not replace them
    (located.source.folder / SINGLE).touch()
    with pytest.raises(ModelUnavailableError, match="only partly in the cache"):
        fetch(open_model("org/tiny"), deepest_layer=2)


@pytest.mark.parametrize(
    ("down", "words"),
    [
        (None, "cannot be reached"),
        (503, "answered 503 for org/other. Try again later."),
        (403, "answered 403 for org/other. Check HF_TOKEN."),
    ],
)
def test_a_hub_that_does_not_help(tiny_hub: MiniHub, monkeypatch, down, words):
    monkeypatch.setattr("time.sleep", lambda _: None)  # without a cache the client retries for 23 s
    fetch_all(open_model("org/tiny"))
    tiny_hub.down = down
    if down is None:
        tiny_hub.close()
    if down != 403:
        assert fetch_all(open_model("org/tiny")).model.source.label == "org/tiny"
    error = failure("org/other")
    assert (error.exit_code, words in f"{error.message} {error.hint}") == (4, True), error


def test_no_network_is_said_at_once(hub: MiniHub, monkeypatch):
    """The client alone would retry for 24 s."""
    hub.close()
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"waits {seconds} s"))
    error = failure("allenai/Olmo-Hybird-7B")
    assert error.exit_code == ExitCode.MODEL_UNAVAILABLE
    assert "cannot be reached: " in error.message
    assert "Similar names: allenai/Olmo-Hybrid-7B." in error.hint


def test_a_password_in_the_endpoint_is_masked(hub: MiniHub, monkeypatch, capsys):
    monkeypatch.setenv("HF_ENDPOINT", hub.url.replace("http://", "http://user:secret@"))
    hub.close()
    error = failure("org/tiny")
    assert "http://...@127.0.0.1" in error.message
    assert "secret" not in str(vars(error)) + "".join(capsys.readouterr())


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("endpoint", ["", "localhost:8000", "hub", "http://[::1", "ftp://hub"])
def test_an_endpoint_that_is_no_address(monkeypatch, endpoint):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    error = failure("org/tiny")
    assert error.exit_code == ExitCode.BAD_INPUT
    assert f"HF_ENDPOINT={endpoint!r}" in error.message


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"HTTP_PROXY": "ftp://proxy:1"}, "Unknown scheme for proxy"),
        ({"HF_TOKEN": "hf_\N{LATIN SMALL LETTER E WITH ACUTE}"}, "can't encode"),
    ],
)
def test_settings_that_the_client_cannot_use(tiny_hub: MiniHub, tmp_path, variables, words):
    """In a separate process, because the client reads them once."""
    hub = {"HF_ENDPOINT": tiny_hub.url, "HF_HOME": str(tmp_path), "NO_PROXY": ""}
    done = python(*MODULE, "capture", "org/tiny", "--dry-run", **hub | variables)
    assert (done.returncode, words in done.stderr, "PROXY" in done.stderr) == (2, True, True), (
        done.stderr
    )


@pytest.mark.usefixtures("tiny_hub")
@pytest.mark.parametrize(
    ("raised", "code", "words"),
    [
        (
            ImportError("Using SOCKS proxy, but the 'socksio' package is not installed"),
            3,
            "socksio",
        ),
        (OSError(122, "Disk quota exceeded"), 3, "The disk is full"),
        (
            PermissionError(13, "Permission denied", "/cache"),
            3,
            "/cache cannot be written: permission denied",
        ),
        (
            OSError(2, "No such file or directory"),
            4,
            "while org/tiny was fetched",
        ),  # from SSL_CERT_FILE, without a name
    ],
)
def test_what_keeps_a_file_from_being_fetched(monkeypatch, raised, code, words):

    def fail(*_, **__):
        raise raised

    monkeypatch.setattr("huggingface_hub.HfApi.hf_hub_download", fail)
    error = failure("org/tiny")
    assert (error.exit_code, words in error.message) == (code, True), error.message
    assert ("HF_HOME" in error.hint) == ("written" in error.message or "full" in error.message)


def test_a_warning_of_the_client_is_masked(hub: MiniHub, capsys):
    import logging

    hub_module.api()
    logging.getLogger("huggingface_hub.utils._http").warning(
        "%s thrown at %s", "Error", "http://user:secret@host/a"
    )
    shown = capsys.readouterr().err
    assert "secret" not in shown


# --- local names


def test_a_folder_that_is_not_there(tmp_path):
    assert failure(str(tmp_path / "nothing")).exit_code == ExitCode.MODEL_UNAVAILABLE
    assert failure("./nothing").exit_code == ExitCode.MODEL_UNAVAILABLE
    file = tmp_path / "file"
    file.touch()
    assert failure(str(file)).exit_code == ExitCode.BAD_INPUT
    assert "no config.json" in failure(str(tmp_path)).message
