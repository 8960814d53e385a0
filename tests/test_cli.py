"""The command line: words in, exit codes and two streams out.  What a model computes is in
test_end_to_end.py.
"""

import errno
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from command_line import Answer, ending
from fakes import denied
from targets import slow
from torchrun import python

import ssdprof
from ssdprof import cli
from ssdprof.checkpoint.names import DEMO_FOLDERS
from ssdprof.commands import terminal
from ssdprof.core.conditions import parse_percent
from ssdprof.environment.machine import collect
from ssdprof.environment.toolchain import Check
from ssdprof.errors import BadInputError, MissingCapabilityError, ModelUnavailableError
from ssdprof.progress import Watcher
from ssdprof.store import reports


@pytest.fixture(autouse=True)
def for_processes(in_empty_folder: None, monkeypatch):
    # for separate processes
    monkeypatch.setenv("PYTHONPATH", str(Path(ssdprof.__file__).parents[1]))


def refused(code: int, command: str) -> str:
    """stderr of a refused call.  It must end in two lines, without data on stdout and without a
    run.
    """
    answer = ending(code, command)
    assert answer.out == ""
    assert answer.err.startswith("error: ")
    assert not list(Path("runs").glob("*"))
    return answer.err


def test_an_export_for_github_needs_both_of_its_files(monkeypatch):
    """`goldens/machine/refused.txt` and `goldens/stored/refused.txt` have what else is refused."""
    monkeypatch.setenv("GITHUB_OUTPUT", "output.txt")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    assert "is for a step of GitHub Actions" in refused(2, "export --format github")


def test_a_history_of_a_run_that_cannot_be_read_has_the_reason():
    Path("runs/x").mkdir(parents=True)
    Path("runs/x/run.json").touch()
    assert "x: runs/x/run.json is not valid JSON" in Answer("runs --history").out


@pytest.mark.parametrize(
    ("text", "value"), [("1%", 0.01), ("0.5", 0.005), ("0%", 0.0), (" 2 %", 0.02)]
)
def test_a_percentage_with_or_without_its_sign(text, value):
    assert parse_percent("--smallest-difference", text) == pytest.approx(value)


def test_another_run_in_the_same_folder():
    header = {"kind": "bench", "target": "demo", "environment": collect(), "baseline": "unfused"}
    with reports.opened(Path("shared"), Watcher(), **header):
        assert "Another run is writing into shared" in refused(2, "run demo --out shared --seq 16")
    assert reports.load("shared")[1].complete


@pytest.mark.parametrize(
    ("raised", "code", "words"),
    [
        (BadInputError("Wrong.", "Do\n  this."), 2, "error: Wrong. hint: Do this."),
        (MissingCapabilityError("Small."), 3, "error: Small."),
        (ModelUnavailableError("Gone."), 4, "error: Gone."),
        (KeyboardInterrupt(), 130, "interrupted: Nothing more was kept."),
        (KeyboardInterrupt("Two cases are kept."), 130, "interrupted: Two cases are kept."),
        (OSError(errno.ENOSPC, "No space left on device", "file"), 3, "error: The disk is full"),
        (
            PermissionError(errno.EACCES, "Permission denied", "/a"),
            3,
            "error: /a cannot be used: Permission denied.",
        ),
        (
            OSError(errno.EROFS, "Read-only file system", "/a"),
            3,
            "error: /a cannot be used: Read-only file system.",
        ),
    ],
)
def test_how_a_command_ends(monkeypatch, raised, code, words):
    def fail(*_):
        raise raised

    monkeypatch.setattr(reports, "load", fail)
    answer = ending(code, "export")
    assert answer.out == ""
    assert answer.err.startswith(words)


def test_a_mistake_of_ours_is_short_on_the_screen_and_whole_in_a_file(
    monkeypatch, capsys, tmp_path
):
    def fail(*_):
        raise ZeroDivisionError("somewhere deep at http://user:secret@host")

    monkeypatch.setattr(reports, "load", fail)
    monkeypatch.setattr(sys, "argv", ["ssdprof", "export"])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("signal.signal", lambda *_: None)  # the process is pytest's
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == cli.INTERNAL_ERROR
    assert not cli.Commands.of_main, "later calls in this process do not fork it"
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(
        "internal error: ZeroDivisionError: somewhere deep at http://...@host\n"
    )
    assert "secret" not in shown.err
    assert "Traceback" not in shown.err
    (log,) = tmp_path.glob("ssdprof-*.log")
    assert "in fail" in log.read_text()
    assert "secret" not in log.read_text().partition("ZeroDivisionError: ")[2]


def test_models_fit_a_terminal(monkeypatch):
    """Nothing is truncated if a row needs more than 80 columns."""
    monkeypatch.setattr("ssdprof.commands.terminal.WIDTH_OF_A_PIPE", 80)
    text = Answer("models").out
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "128x64, N 128, G 1, chunk 256" in text


def test_doctor_prints_a_path_as_it_is(monkeypatch):
    """Square brackets are not markup."""
    check = Check(name="cache", status="ok", detail="/home/[bold]me")
    monkeypatch.setattr("ssdprof.jobs.doctor.doctor", lambda: (check,))
    lines = map(str.split, Answer("doctor").out.splitlines())
    assert ["ok", "cache", "/home/[bold]me"] in lines


def test_the_shell_completes_commands():
    words = dict(_SSDPROF_COMPLETE="complete_bash", COMP_WORDS="ssdprof acc", COMP_CWORD="1")
    assert shell("PROGRAM", **words).stdout.split() == ["accuracy"]


def test_tokens_do_not_reach_the_report(monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["/bin/ssdprof", "run", "org/name", "--revision", "hf_AbCdEf1234567890AbCdEf"]
    )
    assert terminal.command_line() == ("ssdprof", "run", "org/name", "--revision", "hf_...")


def test_paragraphs_of_help_are_wrapped_to_the_terminal_and_not_as_in_the_source():
    shown = shell("COLUMNS=200 PROGRAM run --help").stdout
    assert any(
        "Exit code 0 says" in line and "Exit code 1 says" in line for line in shown.splitlines()
    )


WRONG = """\
run demo --seq 0
run demo --layers x
run demo --layers 99
run demo --states x
run demo --dtypes x
run demo --bogus
run demo --prompt-file absent.txt
run ./nowhere
run damaged
capture demo --layers 3-0
capture ./nowhere
accuracy nothing
export nothing
bench sdd
bench ssd --shape x
bench ssd --shape 8x64x512x1
bench gdn --shape 16/32x512x128
bench gdn --dtype x
bench ssd --seq x
bench ssd --states x
tune ssd --shape x
tune gdn --dtype x
stalls --impl fused,
stalls --seq x
stalls --from demo --layer 3
"""


def test_wrong_usage_is_answered_before_torch_is_imported():
    """torch takes seconds to import and is not needed for the answer."""
    wrong = WRONG.splitlines()
    Path("damaged").mkdir()
    Path("damaged/manifest.json").write_text("{")
    code = (
        "import sys; from ssdprof import cli\n"
        "heavy = {'torch', 'transformers', 'triton'}\n"
        f"for words in {wrong!r}:\n"
        "    sys.argv, code = ['ssdprof', *words.split()], 0\n"
        "    try: cli.main()\n"
        "    except SystemExit as end: code = end.code\n"
        "    print(words, code, *heavy & sys.modules.keys(), sep=',')"
    )
    done = python("-c", code)
    answers = done.stdout.splitlines()
    assert len(answers) == len(wrong), done.stderr
    for words, answer in zip(wrong, answers, strict=True):
        assert answer in (f"{words},2", f"{words},4")


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command line with PROGRAM for `python -m ssdprof`."""
    return subprocess.run(
        ["bash", "-c", command.replace("PROGRAM", f"{sys.executable} -m ssdprof")],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("PROGRAM models >&-", 3, "error: Standard output is closed."),
        ("PROGRAM models > /dev/full", 3, "error: The disk is full"),
        *slow(
            ("PROGRAM models --json > /dev/full", 3, "error: The disk is full"),
            ("PROGRAM export nothing 2> /dev/full", 2, ""),
        ),
        ("PROGRAM export nothing 2>&-", 2, ""),
        (
            "mkdir gone; cd gone; rmdir ../gone; PROGRAM doctor",
            2,
            "error: The working directory does not exist any",
        ),
        # a reader that stops early is no mistake, and no verdict
        *(
            (f"PROGRAM models {option} | true; exit ${{PIPESTATUS[0]}}", 141, "")
            for option in ("", "--json")
        ),
    ],
)
def test_streams_and_folders_that_are_of_no_use(command, code, words):
    done = shell(command)
    assert (done.returncode, done.stdout, bool(done.stderr)) == (code, "", bool(words))
    assert done.stderr.startswith(words)
    assert "Exception" not in done.stderr


@pytest.mark.parametrize(
    "environment",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
    ids=["encoding", "locale"],
)
def test_text_beyond_ascii_is_escaped_as_json_reads_it(environment):
    Path("printing.py").write_text(
        "import json\n"
        "from ssdprof.commands import terminal\n"
        "terminal.prepare()\n"
        "print(json.dumps('\\u00b5 \\U0001f600', ensure_ascii=False))\n"
    )
    done = shell(f"{sys.executable} printing.py", **environment)
    assert done.stdout == '"\\u00b5 \\ud83d\\ude00"\n'
    assert json.loads(done.stdout) == "µ \N{GRINNING FACE}"
    assert shell("PROGRAM models", **environment).returncode == 0


@pytest.mark.parametrize(
    "command",
    [
        "def command():\n    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(30)\n",
        # CPython would end the process by the signal, although the interrupt was handled
        "def command():\n    exec('raise KeyboardInterrupt')\n",
    ],
    ids=["SIGTERM", "inside generated code"],
)
def test_an_interrupt_of_any_kind_is_told(command):
    Path("waiting.py").write_text(
        f"import os, signal, sys, time\nfrom ssdprof import cli\n{command}"
        "cli.app.command('wait')(command)\nsys.argv = ['ssdprof', 'wait']\ncli.main()\n"
    )
    done = shell(f"{sys.executable} waiting.py")
    assert (done.returncode, done.stderr) == (130, "interrupted: Nothing more was kept.\n")


def denied_to_us(suffix: str = "", prefix: str = "", dir: str = "", real=tempfile.mkdtemp):
    return denied() if prefix == ".ssdprof-" else real(suffix, prefix, dir)


def test_permissions_are_told_before_a_model_is_loaded(monkeypatch):
    """Simulated, because root may run the tests and may write everywhere."""
    monkeypatch.setattr(
        "ssdprof.jobs.plan.load_model", lambda *_, **__: pytest.fail("loads the model")
    )
    monkeypatch.setattr("tempfile.mkdtemp", denied_to_us)
    assert "cannot be written: permission denied" in refused(
        3, "capture demo --seq 16 --out captures"
    )
    assert "cannot be written: permission denied" in refused(3, "capture demo --seq 16")


def test_a_prompt_file_that_may_not_be_read(monkeypatch):
    Path("prompt.txt").write_text("words")
    monkeypatch.setattr(Path, "open", denied)
    error = refused(3, "run demo --prompt-file prompt.txt")
    assert "The file prompt.txt cannot be read: Permission denied." in error


def test_a_state_that_no_kernel_takes_is_refused_from_the_config():
    """This happens before any download: the folder has no weights."""

    Path("model").mkdir()
    config = json.loads((DEMO_FOLDERS["demo"] / "config.json").read_text())
    Path("model/config.json").write_text(json.dumps(config | {"mamba_d_state": 512}))
    assert "dstate = 512 in layer 0; kernels take at most 256" in refused(2, "run ./model --seq 16")


def test_ctrl_c_during_the_imports_shows_no_traceback():
    code = """
import sys

class Interrupting:
    def find_spec(self, name, *_):
        if name == "ssdprof.cli":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
from ssdprof.__main__ import main
main()
"""
    done = python("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
