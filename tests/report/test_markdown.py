"""The Markdown report: its tables parse, its numbers equal those of the cases, and nothing breaks
out of them.
"""

import re

import pytest
from cases import RELAXED_FP16, answers, bench, checkpoint, failed, prefill, report
from markdown_it import MarkdownIt
from report.test_contents import result

from ssdprof.core.base import EXACT_FP32
from ssdprof.core.report import Report
from ssdprof.report import markdown
from ssdprof.report.document import compose

PARSER = MarkdownIt("commonmark", {"html": True}).enable("table")
REPORTS = {
    "gpu": report(),
    "cpu": report(gpu=False),
    "several prompts": report(seqlens=(131_072, 1024)),
    "nan": report(change=result("nonfinite", layers=(9,))),
    "refused": report(change=result("refused", precision=RELAXED_FP16)),
    "empty": report(complete=False, cases=(), captured=()),
    "bench": bench(),
    "prefill": prefill(),
    "answers": answers(),
}


def render(found: Report) -> str:
    return markdown.render(compose(found))


def plain(text: str) -> str:
    return text.replace("\u00a0", " ").replace("**", "")


def tables(text: str) -> list[list[list[str]]]:
    """Every table of the rendered Markdown as a list of rows of cells."""
    found = []
    row = []
    for token in PARSER.parse(text):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            row = []
        elif token.type == "inline" and found and token.level >= 4:
            row.append(plain("".join(child.content for child in token.children or ())))
        elif token.type == "tr_close":
            found[-1].append(row)
    return found


@pytest.mark.parametrize("name", REPORTS)
def test_every_table_parses_with_equal_rows_and_folds_are_closed(name):
    text = render(REPORTS[name])
    found = tables(text)
    # each delimiter row became a table
    assert len(found) == len(re.findall(r"^\|:?-", text, re.MULTILINE))
    assert found
    for table in found:
        assert len(table) > 1
        assert len({len(row) for row in table}) == 1
    assert (
        text.count("<details>")
        == text.count("</details>")
        == text.count("<summary>")
        == text.count("</summary>")
    )


def test_names_cannot_break_the_page():
    def change(case):  # type: ignore[no-untyped-def]
        wrong = failed(case, "failed").changed(reason="x | y\n</details> [a](http://b) *z*")
        return wrong if case.layer.index == 9 else case

    name = "a|b<script>*x*`_y_~~$1$"
    found = report(
        model=checkpoint(repo_id=name), target=name, change=change, notes=("- not | a list <b>",)
    )
    text = render(found)
    rendered = PARSER.render(text)
    for tag in ("<script>", "<b>", "<a ", "<em>"):
        assert tag not in rendered
    assert rendered.count("</details>") == text.count("<details>")
    assert {row[-1] for row in tables(text)[0][1:]} == {"x | y </details> [a](http://b) *z*"}


def test_escape_and_numbers_with_their_units():
    assert "](a%20b.svg)" in markdown.render(compose(report()), {"t": "a b.svg"})
    assert "500\u00a0µs" in render(report(layers=(0,), precisions=(EXACT_FP32,)))
    assert markdown.escape("a <b> & c\n d") == "a &lt;b&gt; &amp; c d"
    assert markdown.escape("_x_ a_b 2.1x [2.0, 2.2] [u](v) `c` | $1$") == (
        r"\_x\_ a_b 2.1x [2.0, 2.2] [u\](v) \`c\` \| \$1\$"
    )
