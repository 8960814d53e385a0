"""Classes of options as parameters of commands."""

from __future__ import annotations

from inspect import Signature
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from ssdprof.cli import _COMMANDS, _command
from ssdprof.jobs.options import argument, derived, flag, option, options, parameters, words


@options
class Shelf:
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which shelf.")]
    books: int = option(3, "N", "How many books.", min=0)
    label: str | None = option(None, "", "What it says.", "--label", "--title", shown="blank")


@options
class Tagged(Shelf):
    books: int = option(4, "N", "How many tagged books.", min=0)
    tags: list[Path] | None = option(None, "", "A tag.  Repeatable.", "--tag")
    on: bool = flag("--on", "Switch it on.")
    where: str | None = argument(None, "WHERE", "The room.", shown="all rooms")
    sizes: Any = words("N[,N...]", "Sizes.", "--size", default=(1, 2), typed="1,2")
    full: bool = derived(False)


def invoke(*words: str, code: int = 0) -> tuple[list[Any], str]:
    """What the command was called with, and its output."""
    called: list[Any] = []

    def shelf(**given: Any) -> None:
        called.append(Tagged(**given))

    shelf.__signature__ = Signature(list(parameters(Tagged)))  # type: ignore[attr-defined]
    shelf.__annotations__ = {one.name: one.annotation for one in parameters(Tagged)}
    app = typer.Typer()
    app.command("shelf")(shelf)
    result = CliRunner().invoke(app, words, env={"COLUMNS": "160", "TERM": "dumb"})
    assert result.exit_code == code, result.output
    return called, result.output


def test_every_option_reaches_its_field() -> None:
    assert invoke("top")[0] == [Tagged(name="top", books=4, label=None, tags=None, on=False, where=None, sizes="1,2")]
    words = ["top", "hall", "--books", "7", "--title", "novels", "--tag", "a", "--tag", "b", "--on", "--size", "3"]
    tags = [Path("a"), Path("b")]
    made = Tagged(name="top", books=7, label="novels", tags=tags, on=True, where="hall", sizes="3")
    assert invoke(*words)[0] == [made]


def test_what_is_wrong_is_refused_by_its_name() -> None:
    assert "Missing argument" in invoke(code=2)[1]
    assert "'--books'" in invoke("top", "--books", "-1", code=2)[1]


def test_help_shows_the_fields_in_order_those_of_the_base_class_first() -> None:
    shown = invoke("--help")[1]
    for said in ("Which shelf.", "How many tagged books.", "[default: 4]", "(blank)", "(all rooms)", "[default: 1,2]"):
        assert said in shown
    assert "--full" not in shown
    assert shown.index("--books") < shown.index("--label") < shown.index("--tag ") < shown.index("--on")


@pytest.mark.parametrize("kind", [kind for kind, functions in _COMMANDS.items() if functions])
def test_the_functions_of_a_command_get_its_options(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is called with the options, and each with the result of the function before it."""
    calls: list[tuple[Any, ...]] = []

    class Module:
        def __getattr__(self, name: str) -> Any:
            return lambda *given: calls.append(given) or (name, len(calls))  # type: ignore[func-returns-value]

    monkeypatch.setattr("ssdprof.cli.import_module", lambda _: Module())
    needed = {one.name: "x" for one in parameters(kind) if one.default is one.empty}
    given = {one.name: needed.get(one.name, one.default) for one in parameters(kind)}
    _command(kind, _COMMANDS[kind])(**given)
    names = [name.partition(":")[2] for name in _COMMANDS[kind]]
    assert calls == [(kind(**given),), *((name, number) for number, name in enumerate(names[:-1], start=1))]
