"""What a user's kernel may do to the process that runs it: the command survives, says so, and
leaves no process.
"""

import faulthandler
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from fakes import inputs
from targets import slow
from torchrun import MODULE, python, wait_for

from ssdprof import operators
from ssdprof.environment import child
from ssdprof.kernels import Precision
from ssdprof.measure.isolate import while_it_runs
from ssdprof.operators.implementations import own_implementation
from ssdprof.store import ranks
from ssdprof.store.reports import load

FORKED = """
import atexit, os, signal, sys, threading, time
from ssdprof.environment import child

child._SILENT_S = {silent_s}

def body():
    {body}

ended = child.fork()
if ended is None:
    child.tell("case 1")
    try:
        body()
    except SystemExit as error:
        child.finish(error.code)
    child.finish(0)
told = [ended.last(word) for word in ("exit", "case", "report")]
print(ended.code, *told, ended.stop_signals, *[ended.ending] * ("stopped" in ended.ending))
"""


def silent_s(words: str) -> float:
    """Short for a kernel that hangs, if the words say so; others have time on a busy machine."""
    return 0.2 if "did not end" in words else 99.0


@pytest.mark.parametrize(
    ("body", "printed"),
    [
        ("child.tell('case'); child.tell('report 0 out')", "0 0  0 out 0"),
        ("sys.exit(3)", "3 3 1 None 0"),
        ("os._exit(0)", "0 None 1 None 0"),
        ("child.ctypes.string_at(0)", "-11 None 1 None 0"),
        ("os.closerange(3, 99)", "0 None 1 None 0"),
        ("os.close(1)", "0 None 1 None 0"),
        ("sys.stdout.close()", "0 None 1 None 0"),
        ("sys.stderr = None", "0 None 1 None 0"),
        ("threading.Thread(target=time.sleep, args=(1000,)).start()", "0 0 1 None 0"),
        ("os.fork() or time.sleep(1000)", "0 0 1 None 0"),
        ("child._LINGER_S = 1; atexit.register(time.sleep, 1000)", "-14 0 1 None 0"),
        (
            "time.sleep(1000)",
            "1 None 1 None 0 was stopped: a call of its kernel did not end within 0.2 s",
        ),
    ],
)
def test_however_a_child_ends_its_parent_knows_and_ends(body, printed):
    code = FORKED.format(body=body, silent_s=silent_s(printed))
    assert python("-c", code).stdout == f"{printed}\n"


def test_a_sign_of_life_begins_the_watch_anew_and_the_end_of_the_call_ends_it(monkeypatch):
    watch: list[float] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda s, **_: watch.append(s))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: watch.append(0))
    monkeypatch.setattr(time, "monotonic", lambda: 5.0)
    for name, value in dict(_channel_fd=-1, _at_work=False, _alive_s=0.0, _SILENT_S=7.0).items():
        monkeypatch.setattr(child, name, value)
    child.tell("case 1")
    for _ in range(2):  # at most once a second
        child.alive()
    child.tell("case")
    child.tell("report 0 out")
    assert watch == [7, 7, 0, 0]
    assert "stopped" not in child.Ended(["case 1", "case"], 1, 0, 9.0).ending


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_child_ends_with_its_parent(number: signal.Signals, tmp_path):
    work = "open('child', 'w').write(str(os.getpid()))\n    time.sleep(1000)"
    code = FORKED.format(body=work, silent_s=silent_s(""))
    file = tmp_path / "child"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as parent:
        pid = int(wait_for(lambda: file.exists() and file.read_text()))
        parent.send_signal(number)
        printed, _ = parent.communicate(timeout=30)
    assert printed == ("-15 None 1 None 1\n" if number == signal.SIGTERM else "")
    wait_for(lambda: not ranks._runs(pid))


RUN = """
import os, sys
import cases
from pathlib import Path
from ssdprof import cli
from ssdprof.environment import child
from ssdprof.progress import Watcher
from ssdprof.store.reports import opened

def work(*_):
    if Path("out").exists():
        return  # a command is two functions
    unfused, own = cases.case("unfused"), cases.case("k:f", kind="own")
    requested = tuple(map(cases.requested, (unfused, own)))
    checkpoint, here = cases.checkpoint(), cases.environment()
    header = dict(kind="run", target="m", model=checkpoint, environment=here, baseline="unfused")
    with opened(Path("out"), Watcher(), **header, requested=requested) as writer:
        writer.case(unfused)
        child.tell("case " + own.model_dump_json(exclude_defaults=True))
        {deed}
        child.tell("case")
        writer.case(own)
    {later}

class Module:
    run = staticmethod(work)

child._SILENT_S = {silent_s}
real = cli._module
cli._module = lambda name: real(name) if name == "commands.stored" else Module()
sys.argv = ["ssdprof", "run", "demo", "--impl", "unfused,k:f", "--out", "out"]
cli.main()
"""


@pytest.mark.parametrize(
    ("deed", "later", "code", "words"),
    [
        ("pass", "pass", 0, ""),
        ("os._exit(0)", "pass", 1, "FAILED: 1 of 2 cases: k:f"),
        (
            # a signal would wait for a thread that takes it
            "child.tell('law a'); child.ctypes.string_at(0)",
            "pass",
            1,
            "The process that ran k:f ended early, with SIGSEGV, in the law 'a'",
        ),
        *slow(
            ("pass", "sys.stdout.close(); print()", 0, "PASSED: all 2 cases"),
            (
                "child.time.sleep(1000)",
                "pass",
                1,
                "ran k:f was stopped: a call of its kernel did not end within 0.2 s",
            ),
        ),
        ("import shutil; shutil.rmtree('out')", "pass", 3, "out cannot be written: it was removed"),
    ],
)
def test_a_command_reports_whatever_ended_its_child(deed, later, code, words, tmp_path):
    done = python("-c", RUN.format(deed=deed, later=later, silent_s=silent_s(words)), cwd=tmp_path)
    assert (done.returncode, words in done.stdout + done.stderr) == (code, True), (
        done.stdout + done.stderr
    )
    assert "What was done is kept" not in done.stderr
    if code < 2:
        results = {case.implementation: case.result for case in load(tmp_path / "out")[1].cases}
        assert results == {"unfused": "passed", "k:f": "failed" if code else "passed"}


def test_a_module_that_ends_the_process_while_it_is_imported(tmp_path):
    (tmp_path / "k.py").write_text("import os\nos._exit(0)\n")
    bench = "bench ssd --shape 1x16x16x1 --seq 16 --against k:f"
    done = python(*MODULE, *bench.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert "error: The process that ran k:f ended early" in done.stderr


class Own(BaseException):
    pass


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit(), Own("why"), KeyError("why")])
def test_whatever_a_kernel_raises_is_an_error_of_its_case(error):
    def kernel(_inputs):
        raise error

    made = own_implementation(operators.get("ssd"), "k:f", kernel)
    with pytest.raises(Exception, match=str(error) or type(error).__name__):
        made.run(inputs(), Precision())


def test_what_a_kernel_changes_in_its_process_is_restored(tmp_path):
    before = Path.cwd(), torch.is_grad_enabled(), torch.get_default_dtype()
    with while_it_runs(None):
        os.chdir(tmp_path)
        torch.set_grad_enabled(not before[1])
        torch.set_default_dtype(torch.float64)
    assert (Path.cwd(), torch.is_grad_enabled(), torch.get_default_dtype()) == before
