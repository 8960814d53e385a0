"""`ssdprof record`: a server runs as without, and what went wrong in it is named."""

import ctypes
import inspect
import os
import re
import runpy
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command_line import ending
from fakes import disk_with_room_for
from record import servers
from targets import slow
from torch.nn.functional import normalize
from torchrun import python

from ssdprof.capture.layers import CapturedLayer
from ssdprof.capture.manifest import read_manifest
from ssdprof.capture.recording import open_recording
from ssdprof.capture.store import read_layer
from ssdprof.kernels import GDNInputs, KDAInputs
from ssdprof.kernels.inputs import Inputs
from ssdprof.progress import LineWatcher
from ssdprof.record import hook, recorder, settings
from ssdprof.record.places import PLACES
from ssdprof.record.recorded_call import RecordedCall
from ssdprof.record.recorder import Recorder
from ssdprof.record.settings import GIGABYTE, RecordSettings

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "ssdprof", "record", "--out", "out")


@pytest.fixture
def server(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecretsecret")
    return servers.write(tmp_path)


def record(options: str, *program: str, text: str = "") -> subprocess.CompletedProcess[str]:
    words = [*COMMAND, *options.split(), "--", *program]
    return subprocess.run(words, input=text, capture_output=True, text=True)


def notes_in(stderr: str) -> list[str]:
    return re.findall(r"^ssdprof: (.*)$", stderr, re.MULTILINE)


@pytest.mark.slow
def test_a_recorded_server_runs_as_without(server: Path, capfd, monkeypatch):
    """Its input, output, bits and exit code; the calls of all of its processes are a capture."""
    ran = record("", sys.executable, str(server), "no", "fork", "spawn", text="from stdin")
    assert ran.returncode == 7, ran.stderr
    first, *digests = ran.stdout.splitlines()
    assert first == "from stdin"
    assert not notes_in(ran.stderr)
    monkeypatch.syspath_prepend(server.parent)
    monkeypatch.setattr(sys, "argv", [str(server), "no"])
    monkeypatch.setenv("RANK", "")  # which `work` sets
    work = runpy.run_path(str(server))["work"]
    for rank, passes in enumerate((1, 12, 12, 2)):
        work(rank, passes)
    assert capfd.readouterr().out.splitlines() == digests
    folder = Path("out")
    manifest = read_manifest(folder)
    layers = [(layer.index, layer.name) for layer in manifest.checkpoint.layers]
    assert layers == [(index, f"model.layers.{index}.linear_attn") for index in (2, 9, 10)]
    assert len(manifest.layers) == 3 * (1 + 12 + 12 + 2)
    assert {entry.call and entry.call.rank for entry in manifest.layers} == {0, 1, 2, 3}
    captured = read_layer(folder, manifest.layers[-1])
    assert str(captured.call) == "in 2 packed sequences, pass 27 of 27, rank 3"
    assert captured.inputs.sequences == 2
    assert captured.served[1].any()  # the server has overwritten them
    assert manifest.checkpoint.model_type == "recorded by flash-linear-attention 0.6.0"
    for file in (folder, *folder.rglob("*")):
        assert not stat.S_IMODE(file.stat().st_mode) & 0o077
        assert file.is_dir() or b"secretsecret" not in file.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "fault", "line"),
    [
        (
            "nonfinite",
            "nan",
            "layer model.layers.10.linear_attn, rank 1: out, sequence 1, position 1, head 1 is NaN "
            "or infinite; its inputs are finite.",
        ),
        (
            "wrong",
            "padding",
            "layer model.layers.10.linear_attn, rank 1: row 0 of call 12 begins with a state "
            "that no earlier call left.",
        ),
    ],
)
def test_a_layer_that_goes_wrong_is_named(server: Path, when, fault, line):
    ran = record(f"--when {when} --keep 2", sys.executable, str(server), fault, "fork")
    assert notes_in(ran.stderr) == [line]
    assert len(read_manifest(Path("out")).layers) == 3


# --- in this process

LIBRARY = "fla.ops.gated_delta_rule"
Function = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Chunked = Callable[..., Function]  # the fixture `chunked`


@pytest.fixture
def chunked(server: Path, monkeypatch) -> Iterator[Chunked]:
    """Gives the library's function, recorded with other settings than those of the command."""
    monkeypatch.syspath_prepend(server.parent)
    finders = list(sys.meta_path)
    (server.parent / "calls").mkdir()

    def installed(**changes) -> Function:
        settings = {
            "folder": str(server.parent / "calls"),
            "operators": ("gdn",),
            "when": "always",
            "keep": 2,
            "max_bytes": GIGABYTE,
            "max_calls": 100,
            "max_delay_s": 0.0,
            "modules": tuple({place.module for place in PLACES}),
        }
        variables = RecordSettings(**settings | changes).environment  # type: ignore[arg-type]
        monkeypatch.setenv(hook.VARIABLE, variables[hook.VARIABLE])
        hook.install()
        # a program may look for a module before it imports it
        module = f"{LIBRARY}.chunk"
        spec = hook.find_spec(module, [str(server.parent / LIBRARY.replace(".", "/"))])
        # another finder that has asked this one
        finder = SimpleNamespace(find_spec=lambda name, *_: spec if name == module else None)
        sys.meta_path.insert(1, finder)
        function: Function = import_module(LIBRARY).chunk_gated_delta_rule
        return function

    settings._SHOWN.clear()
    yield installed
    Recorder.forget()
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        del sys.modules[name]


def arguments(tokens: int = 6) -> dict[str, torch.Tensor]:
    return {
        "q": torch.randn(2, tokens, 1, 16),
        "k": normalize(torch.randn(2, tokens, 1, 16), dim=-1),
        "v": torch.randn(2, tokens, 2, 16),
        "g": -torch.rand(2, tokens, 2),
        "beta": torch.rand(2, tokens, 2),
    }


def stored() -> int:
    """The number of calls that were stored, after the thread has ended."""
    process = Recorder.of_process()
    process.flush()
    files = list(Path("calls").glob("*.safetensors"))
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    return len(files)


def check_recorded(inputs: dict[str, torch.Tensor], out: torch.Tensor) -> CapturedLayer:
    """The one call that was recorded has these inputs and this output."""
    (call,) = open_recording(Path("calls"), "safetensors").layers()
    for name, tensor in inputs.items():
        assert torch.equal(call.inputs.tensors[name].reshape(tensor.shape), tensor), name
    assert torch.equal(call.served[0][0], out.flatten(0, 1))
    return call


@pytest.fixture
def blocked(monkeypatch) -> threading.Event:
    """Before this event the thread stores nothing."""
    event, get = threading.Event(), recorder._Queue.get
    monkeypatch.setattr(recorder._Queue, "get", lambda queue: event.wait() and get(queue))
    return event


def test_a_wrapped_function_looks_like_the_librarys(chunked: Chunked):
    package = import_module(LIBRARY)
    original = package.chunk_gated_delta_rule
    wrapped = chunked()
    assert package.chunk_gated_delta_rule is wrapped is package.chunk.chunk_gated_delta_rule
    assert wrapped is not original
    assert inspect.signature(wrapped) == inspect.signature(original)
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "attribute"):
        assert getattr(wrapped, name) == getattr(original, name)
    given = arguments()
    expected = original(**given)
    assert all(map(torch.equal, wrapped(**given), expected))
    assert stored() == 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_buffers_are_recorded_as_they_were_before_the_program_goes_on(
    chunked: Chunked, blocked: threading.Event, device: str
):
    """The function overwrites v, the server all else in its next statement.  A batch of two is
    recorded as a pack.
    """
    function = chunked()
    buffers = {name: tensor.to(device) for name, tensor in arguments(4).items()} | {
        "initial_state": torch.randn(2, 2, 16, 16, device=device)
    }
    before = {name: tensor.cpu().clone() for name, tensor in buffers.items()}
    returned = function(**buffers, fault="overwrites")
    out, states = (tensor.cpu().clone() for tensor in returned)
    for tensor in (*buffers.values(), *returned):
        tensor.zero_()
    blocked.set()
    assert stored() == 1
    assert torch.equal(check_recorded(before, out).served[1], states)


@pytest.mark.gpu
def test_memory_of_a_large_prompt_is_not_used_again_before_it_is_copied(
    chunked: Chunked, monkeypatch
):
    """Its copies wait for a slow kernel; the program overwrites the initial states, which are part
    of a pool, frees all inputs, dense or not, and takes new memory.
    """
    monkeypatch.setattr(recorder, "_LARGE_BYTES", 0)
    function, waiting = chunked(), recorder._wait
    given = {name: tensor.cuda() for name, tensor in arguments(64).items()}
    given["q"] = given["q"].mT.contiguous().mT
    given["v"] = torch.cat([given["v"]] * 2, -1)[..., 16:]
    given["initial_state"] = torch.randn(5, 2, 16, 16, device="cuda")[2:4]
    before = {name: tensor.cpu() for name, tensor in given.items()}

    def wait(stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        waiting(stream, other)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1 << 28)

    monkeypatch.setattr(recorder, "_wait", wait)
    out, states = function(**given)
    given["initial_state"].copy_(states)
    out = out.cpu()
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in given.items()}
    given.clear()
    taken = [
        torch.full(shape, torch.nan, dtype=dtype, device="cuda")
        for _ in range(4)
        for shape, dtype in shapes.values()
    ]
    assert stored() == 1
    assert all(tensor.isnan().all() for tensor in taken)
    check_recorded(before, out)


@pytest.mark.parametrize("driver", ["copies", "refuses", "is older"])
def test_copies_on_a_second_stream_are_clones(monkeypatch, driver: str):
    """Of dense tensors by one call of the driver, if it can."""
    sizes = []

    def copy_together(targets, sources, nbytes, count, *_) -> int:
        sizes.extend(nbytes)
        assert len(nbytes) == count.value
        if driver == "copies":
            for each in zip(targets, sources, nbytes, strict=True):
                ctypes.memmove(*each)
        return driver == "refuses"

    stream = SimpleNamespace(device_index=0, cuda_stream=1)
    monkeypatch.setattr(
        recorder, "_memcpy_batch", lambda: None if driver == "is older" else copy_together
    )
    pool = torch.randn(4, 2, 3)
    tensors = pool, pool[1:3], pool.mT, pool[:, :1], pool[:, 0, :1].expand(4, 5)
    values = {str(index): tensor for index, tensor in enumerate(tensors)}
    for name, copy in recorder._copies(values, values, stream).items():
        assert torch.equal(copy, values[name])
        assert copy.stride() == values[name].clone().stride()
        assert copy.data_ptr() != values[name].data_ptr()
    assert sizes == ([] if driver == "is older" else [96, 48, 96])


class Layer(torch.nn.Module):
    def __init__(self, name: str):
        super().__init__()
        self.prefix = name

    def forward(self, function: Function, **options):
        return function(**options)


@pytest.mark.parametrize(
    ("room", "expected"), [(9, ["a 10", "a 11", "a 12"]), (2.5, ["a 11", "a 12"]), (0, ["a 12"])]
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_oldest_calls_give_way_and_none_is_lost(
    chunked: Chunked, monkeypatch, device, room, expected
):
    """Of 25 calls of two layers in turn: those before the one that is not finite, as far as there
    is room for so many.  Later ones of its layer are not recorded.
    """
    monkeypatch.setattr(recorder, "_LARGE_BYTES", 0)
    given = {name: tensor.to(device) for name, tensor in arguments().items()}
    states, out = torch.randn(2, 2, 16, 16, device=device), given["v"]
    nbytes = sum(tensor.nbytes for tensor in (*given.values(), out, states))
    monkeypatch.setattr(recorder, "_RING_BYTES", int(room * nbytes))
    function = chunked(when="nonfinite")
    for number in range(13):
        for layer in (Layer("a"), Layer("b")):
            fault = "nan" if number == 12 else ""
            changed = {name: tensor + number / 100 for name, tensor in given.items()}
            layer(function, **changed, fault=fault)
            if fault:
                break
    process = Recorder.of_process()
    while not process._keeper.failed:
        time.sleep(0.01)
    Layer("a")(function, **given)
    assert stored() == len(expected)
    assert not process.lost
    assert process._next_numbers == {("gdn", "a"): 13, ("gdn", "b"): 12}
    recorded = open_recording(Path("calls"), "safetensors").layers()
    for call, text in zip(recorded, expected, strict=True):
        name, number = text.split()
        assert call.layer.name == name
        beta = (given["beta"] + int(number) / 100).flatten(0, 1)[None].cpu()
        assert torch.equal(call.inputs.tensors["beta"], beta)


def test_calls_that_cannot_be_recorded_are_left_alone(chunked: Chunked, capfd, monkeypatch):
    """With gradients, of other shapes, without memory for copies, inside a CUDA graph, and while a
    compiler traces.
    """

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    function, given = chunked(), arguments()
    out, _ = function(**given | {"v": given["v"].requires_grad_()})
    assert out.requires_grad
    with torch.no_grad():
        with pytest.raises(ValueError, match="g must have shape"):
            function(**given | {"g": given["g"][:, 1:]})
        monkeypatch.setattr(settings, "_SHOWN", set())
        function(**given, fault="row")
        monkeypatch.setattr(recorder, "_copies", full)
        function(**given)
        monkeypatch.delenv(hook.VARIABLE)  # programs may change their environment
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for _ in range(2):
            function(**given)
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        function(**given)
        assert stored() == 0
    lines = notes_in(capfd.readouterr().err)
    assert "chunk_gated_delta_rule are not recorded: g must have shape" in lines[0]
    assert "final_states is (1, 2, 16, 16), not (2, 2, 16, 16)" in lines[1]
    assert lines[2] == "Calls inside CUDA graphs cannot be recorded."
    assert lines[3].startswith("1 call with gradients, or of a subclass of Tensor: not recorded")
    assert lines[5].startswith("1 call for which its device had no memory: not recorded")
    assert lines[6].startswith("2 calls inside CUDA graphs: not recorded")
    # later calls begin no second recorder
    Recorder.forget()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)
    monkeypatch.setattr(threading.Thread, "start", full)
    chunked()
    files = []
    for _ in range(3):
        function(**given)
        files.append(len(os.listdir("/proc/self/fd")))
    assert len({*files}) == 1


def test_calls_take_half_of_a_gpus_memory(chunked: Chunked, monkeypatch):
    """The other half stays free."""
    chunked()
    process = Recorder.of_process()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (800, 900))
    process._limit_memory(torch.device("cuda"))
    # as much as is free; calls in the queue hold twice their size
    assert process._keeper.most_bytes == 2 * process._queue.most_bytes


def test_a_full_queue_drops_calls_and_a_full_disk_ends_recording(
    chunked: Chunked, blocked: threading.Event, capfd, monkeypatch
):
    function = chunked()
    monkeypatch.setattr(recorder, "_WAITING_BYTES", 0)
    for _ in range(6):
        function(**arguments())
    with disk_with_room_for(1000):
        blocked.set()
        assert stored() == 0
    assert not list(Path("calls").glob("*.tmp"))
    ended, dropped = notes_in(capfd.readouterr().err)
    assert re.match(r"Recording has ended: .*File too large.*  The program goes on.", ended)
    assert re.match("5 calls because the queue was full: not recorded", dropped)


@pytest.mark.parametrize("stops", [True, False])
def test_gates_are_activated_for_calls_that_are_stored(chunked: Chunked, capfd, monkeypatch, stops):
    """In the recorder's thread; of the others after as many calls as are allowed, or without a
    fault, they stay raw.
    """
    sigmoid, threads = torch.Tensor.sigmoid, []

    def activated(beta: torch.Tensor) -> torch.Tensor:
        threads.append(threading.current_thread().name)
        return sigmoid(beta)

    monkeypatch.setattr(torch.Tensor, "sigmoid", activated)
    function = chunked(max_calls=2) if stops else chunked(when="nonfinite")
    for _ in range(4):
        function(**arguments(), use_beta_sigmoid_in_kernel=True)
    assert stored() == len(threads) == 2 * stops
    assert {*threads} <= {"ssdprof-record"}
    assert ("ssdprof: Recording has ended: as much" in capfd.readouterr().err) is stops


def test_a_transposed_state_is_outside_the_budget(chunked: Chunked, capfd):
    function = chunked(when="wrong")
    function(**arguments(), fault="transposed")
    assert stored() == 1
    line = capfd.readouterr().err
    assert f"a layer that is not known, process {os.getpid()}: final_states, head " in line
    assert "the first wrong state is that of sequence 0 (6 tokens)" in line
    (call,) = open_recording(Path("calls"), "safetensors").layers()
    assert call.remark.startswith("While it was recorded: a layer that is not known, process ")


def test_comparisons_that_fail_are_as_rare_as_others(chunked: Chunked, monkeypatch):
    function = chunked(when="wrong")
    monkeypatch.setattr("ssdprof.record.verdict.compare", None)
    monkeypatch.setattr("ssdprof.record.keeper._SHARE", 1e-9)
    for _ in range(3):
        function(**arguments(), fault="transposed")
    assert stored() == 0
    assert Recorder.of_process().lost.total() == 1


def test_a_function_that_has_changed_is_named(server: Path, chunked: Chunked, capfd):
    library = server.parent / "fla" / "ops" / "gated_delta_rule" / "chunk.py"
    library.write_text(library.read_text().replace("cu_seqlens", "offsets"))
    function = chunked()
    assert function.__code__.co_filename == str(library)
    line = capfd.readouterr().err
    assert "chunk_gated_delta_rule of flash-linear-attention 0.6.0 has no parameter cu_" in line


def call_of(inputs: Inputs, out: torch.Tensor, **outputs: torch.Tensor) -> RecordedCall:
    place = next(place for place in PLACES if place.operator == inputs.operator)
    missing = dict.fromkeys(("final_states", "slots"))
    return RecordedCall(
        place=place, layer="", number=0, inputs=inputs, out=out, **missing | outputs
    )


def test_calls_without_a_layer_are_those_of_their_operator(chunked: Chunked):
    """Of each, the first that is not finite is stored."""
    chunked(when="nonfinite")
    process = Recorder.of_process()
    given = arguments()
    of_channels = given["g"][..., None].expand(-1, -1, -1, 16)
    for inputs in (GDNInputs(**given), KDAInputs(**given | {"g": of_channels})):
        process._keeper.keep(call_of(inputs, out=given["v"] * torch.nan))
    assert stored() == 2


@pytest.mark.parametrize(
    ("state_every", "states", "where"),
    [
        (0, [0, 2], "the final state of sequence 1 (slot 0), head 1 is NaN"),
        (1, [0, 1, 4, 5], "the state after sequence 1 (slot 0), position 1, head 1 is NaN"),
    ],
)
def test_rows_of_padding_are_not_stored(state_every, states, where):
    given = {name: tensor[:1] for name, tensor in arguments(7).items()}
    bounds, slots = torch.tensor([0, 2, 4, 6]), torch.tensor([3, -1, 0])
    inputs = GDNInputs(
        **given, cu_seqlens=bounds, initial_state=torch.randn(3, 2, 16, 16), state_every=state_every
    )
    final_states = torch.randn(7, 2, 16, 16)
    final_states[states[-1], 1] = torch.nan
    call = call_of(inputs, out=given["v"], final_states=final_states, slots=slots).packed()
    assert call.slots.tolist() == [3, 0]
    assert call.inputs.tensors["cu_seqlens"].tolist() == [0, 2, 4]
    assert torch.equal(call.out, given["v"][:, [0, 1, 4, 5]])
    torch.testing.assert_close(call.final_states, final_states[states], equal_nan=True)
    assert where in call.first_nonfinite()
    assert torch.equal(call.inputs.tensors["initial_state"], inputs.initial[[0, 2]])


def test_a_step_of_many_parts_has_few_lines(capsys):
    with LineWatcher().step("Reading", 999) as advance:
        for _ in range(999):
            advance(1)
    assert capsys.readouterr().err == "Reading\nReading: 999 of 999\n"


# --- the program's own surroundings


def test_the_installations_sitecustomize_runs_and_paths_are_as_without(server: Path):
    (server.parent / "sitecustomize.py").write_text("print('customised', __name__)")
    program = (sys.executable, "-c", "import sys, sitecustomize; print(sys.path, sitecustomize)")
    alone = subprocess.run(program, capture_output=True, text=True, check=True)
    # the command itself is a Python process, too
    assert record("", *program).stdout.removeprefix("customised sitecustomize\n") == alone.stdout
    assert alone.stdout.startswith("customised sitecustomize")


SLEEP = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(60)"


@pytest.mark.parametrize(
    ("number", "ends"), [(signal.SIGTERM, -15), *slow((signal.SIGINT, -2), (signal.SIGKILL, -9))]
)
def test_signals_reach_the_program_and_its_end_is_that_of_the_command(
    server: Path, number: signal.Signals, ends
):
    """SIGKILL goes to the program: nothing can pass it on."""
    words = [*COMMAND, "--", sys.executable, "-c", SLEEP]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as command:
        program = int(command.stdout.readline())
        os.kill(program if number == signal.SIGKILL else command.pid, number)
        assert command.wait(300) == ends


EARLY = """
import os, signal, subprocess
from ssdprof.jobs import record

start = subprocess.Popen

def started(*arguments, **options):
    process = start(*arguments, **options)
    os.kill(os.getpid(), signal.SIGUSR1)
    return process

subprocess.Popen = started
print(record._run_program(["sleep", "60"], dict(os.environ)) == -signal.SIGUSR1)
"""


def test_a_signal_while_the_program_starts_is_passed_on():
    """In a process without threads, as the command has none."""
    assert python("-c", EARLY).stdout == "True\n"


@pytest.mark.parametrize(
    ("options", "program", "code", "line"),
    [
        ("", ["true"], 0, "the program called no function that ssdprof knows"),
        ("", ["no-such-server"], 2, "no-such-server cannot be started"),
        ("--max-delay inf", ["true"], 2, "inf is not below 1,000,000,000"),
        *slow(
            (
                "--when nonfinite",
                [sys.executable, "server.py", "none"],
                7,
                r"No call was stored: ssdprof saw [3-9] calls, whose outputs are finite\.",
            )
        ),
    ],
)
def test_a_sentence_says_why_nothing_is_stored_and_no_folder_stays(
    server: Path, options, program, code, line
):
    ran = record(f"{options} --out new/out", *program)
    assert ran.returncode == code
    assert re.search(line, ran.stderr)
    assert not Path("new").exists()


def test_an_unfinished_recording_is_refused(server: Path):
    """Its command was killed."""
    record("", "sh", "-c", "kill -9 $PPID")
    assert "out holds an unfinished recording of 0 calls." in ending(2, "run out").err
    assert "out holds an unfinished recording." in record("", "true").stderr
