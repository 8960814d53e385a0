"""Dataclasses of options as parameters of commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from ssdprof.commands.grouped import grouped
from typer.testing import CliRunner


@dataclass(frozen=True, kw_only=True)
class Shelf:
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which shelf.")]
    books: Annotated[int, typer.Option(metavar="N", min=0, help="How many books.")] = 3
    label: Annotated[str | None, typer.Option("--label", "--title", help="What it says.", show_default="blank")] = None


@dataclass(frozen=True, kw_only=True)
class TaggedShelf(Shelf):
    books: Annotated[int, typer.Option(metavar="N", min=0, help="How many tagged books.")] = 4
    tags: Annotated[list[Path] | None, typer.Option("--tag", help="A tag.  Repeatable.")] = None


@dataclass(frozen=True, kw_only=True)
class Lamp:
    on: Annotated[bool, typer.Option("--on", help="Switch it on.")] = False


def calls_of(*words: str) -> list[dict[str, Any]]:
    """The arguments with which these words call a command."""
    calls: list[dict[str, Any]] = []

    @grouped
    def light(shelf: TaggedShelf, height: Annotated[float, typer.Option()] = 1.5, *, lamp: Lamp) -> None:
        """Light a shelf."""
        calls.append({"shelf": shelf, "height": height, "lamp": lamp})

    invoke(light, *words)
    return calls


def invoke(command: Callable[..., None], *words: str, code: int = 0) -> str:
    app = typer.Typer()
    app.command("shelf")(command)
    result = CliRunner().invoke(app, words, env={"COLUMNS": "160", "TERM": "dumb"})
    assert result.exit_code == code, result.output
    return result.output


def test_defaults() -> None:
    shelf = TaggedShelf(name="top", books=4, label=None, tags=None)
    assert calls_of("top") == [{"shelf": shelf, "height": 1.5, "lamp": Lamp(on=False)}]


def test_every_option_reaches_its_field() -> None:
    words = ["top", "--books", "7", "--title", "novels", "--tag", "a", "--tag", "b", "--height", "2", "--on"]
    shelf = TaggedShelf(name="top", books=7, label="novels", tags=[Path("a"), Path("b")])
    assert calls_of(*words) == [{"shelf": shelf, "height": 2.0, "lamp": Lamp(on=True)}]


@grouped
def show(height: Annotated[float, typer.Option(help="How high.")] = 1.5, *, shelf: Shelf, lamp: Lamp) -> None:
    """Show a shelf."""
    print(height, shelf, lamp)


def test_a_field_without_a_default_is_required() -> None:
    assert "Missing argument" in invoke(show, code=2)


def test_a_value_out_of_bounds() -> None:
    assert "'--books'" in invoke(show, "top", "--books", "-1", code=2)


def test_help_is_that_of_a_command_with_the_fields_as_parameters() -> None:
    def flat(
        name: Annotated[str, typer.Argument(metavar="NAME", help="Which shelf.")],
        height: Annotated[float, typer.Option(help="How high.")] = 1.5,
        books: Annotated[int, typer.Option(metavar="N", min=0, help="How many books.")] = 3,
        label: Annotated[
            str | None, typer.Option("--label", "--title", help="What it says.", show_default="blank")
        ] = None,
        on: Annotated[bool, typer.Option("--on", help="Switch it on.")] = False,
    ) -> None:
        """Show a shelf."""

    shown = invoke(show, "--help")
    assert "Show a shelf." in shown
    assert shown == invoke(flat, "--help")


def test_a_field_that_a_subclass_declares_again_keeps_its_place() -> None:
    @grouped
    def tag(shelf: TaggedShelf) -> None:
        """Tag a shelf."""

    shown = invoke(tag, "--help")
    assert "How many tagged books." in shown
    assert shown.index("--books") < shown.index("--label") < shown.index("--tag ")


def test_two_options_of_one_name() -> None:
    def move(shelf: Shelf, tagged: TaggedShelf) -> None: ...

    with pytest.raises(ValueError, match="duplicate parameter name: 'name'"):
        grouped(move)


@dataclass(frozen=True, kw_only=True)
class Box:
    box: int = 1


def test_a_field_with_the_name_of_the_parameter() -> None:
    packed: list[Box] = []

    @grouped
    def pack(box: Box) -> None:
        packed.append(box)

    invoke(pack, "--box", "2")
    assert packed == [Box(box=2)]
