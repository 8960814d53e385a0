"""A figure of matplotlib as SVG, without a window, a date or a random identifier."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# readable on white and on black, and, as far as nine colours can be, distinct without colour vision
COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#999933", "#bbbbbb")
GREY = "#777777"
NARROW = (5.2, 3.4)  # inches: readable on a page that is 400 pixels wide
_SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "ssdprof",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
}


def draw(paint: Callable[[Figure], None], size: tuple[float, float] = NARROW) -> str:
    """size: width and height in inches."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=size, layout="constrained")
        paint(figure)
        out = io.StringIO()
        canvas: Any = FigureCanvasSVG(figure)
        canvas.print_svg(out, metadata={"Date": None, "Creator": "ssdprof"})
    return out.getvalue()


def plain(figure: Figure) -> Axes:
    """Remove the frame of the axes at the top and at the right."""
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def legend_below(figure: Figure, columns: int = 2) -> None:
    figure.legend(loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
