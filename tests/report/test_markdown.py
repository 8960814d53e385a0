"""The Markdown report: its tables parse, its numbers equal those of the JSON, and GitHub accepts its size."""

import re

import pytest
from markdown_it import MarkdownIt
from report.make import ALL_PRECISIONS, RELAXED_FP16, failed, make_checkpoint, make_report

from ssdprof.report import format as fmt
from ssdprof.report import markdown
from ssdprof.report.origin import MEANINGS, meanings
from ssdprof.schema import EXACT_FP32

PARSER = MarkdownIt("commonmark", {"html": True}).enable("table")


def plain(text):
    return text.replace("\u00a0", " ").replace("**", "")


def tables(text):
    """Every table of the rendered Markdown as a list of rows of cells."""
    found, row = [], []
    for token in PARSER.parse(text):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            row = []
        elif token.type == "inline" and found and token.level >= 4:
            row.append(plain("".join(child.content for child in token.children)))
        elif token.type == "tr_close":
            found[-1].append(row)
    return found


REPORTS = {
    "gpu": lambda: make_report(),
    "cpu": lambda: make_report(gpu=False, precisions=ALL_PRECISIONS),
    "several prompts": lambda: make_report(seqlens=(131_072, 1024)),
    "nan": lambda: make_report(change=lambda c: failed(c, "nonfinite", "a | b") if c.layer.index == 9 else c),
    "refused": lambda: make_report(change=lambda c: failed(c, "refused", "no") if c.precision == RELAXED_FP16 else c),
    "partial": lambda: make_report(state="partial"),
    "empty": lambda: make_report(state="partial", cases=(), captured_layers=()),
}


@pytest.fixture(params=REPORTS)
def report(request):
    return REPORTS[request.param]()


def test_every_table_parses_with_equal_rows(report):
    text = markdown.render(report)
    found = tables(text)
    assert len(found) == len(re.findall(r"^\|:?-", text, re.MULTILINE))  # each delimiter row became a table
    assert found
    for table in found:
        assert len(table) > 1
        assert len({len(row) for row in table}) == 1


def test_folds_are_closed(report):
    text = markdown.render(report)
    assert text.count("<details>") == text.count("</details>") == text.count("<summary>") == text.count("</summary>")


def test_every_speed_of_the_json_is_in_the_row_of_its_layer():
    report = make_report(seqlens=(131_072, 1024), layers=(0, 9))
    sections = re.findall(
        r"<summary>Speed of each layer at ([\d,]+) tokens</summary>(.*?)</details>", markdown.render(report), re.S
    )
    assert [tokens for tokens, _ in sections] == ["131,072", "1,024"]
    rows = {tokens: tables(body)[0] for tokens, body in sections}
    for case in report.cases:
        precision = f"{case.precision.intermediates}, {case.precision.state_dtype}"
        key = [str(case.layer.index), f"{case.implementation} {case.variant}", precision]
        (row,) = [row for row in rows[f"{case.dims.seqlen:,}"] if row[:3] == key]
        assert fmt.duration(case.timing.device_median_us) in row
        assert fmt.duration(case.timing.call_median_us) in row
        assert fmt.percent(case.roofline.floor_pct, 1) in row
        assert fmt.size(case.memory.workspace_bytes) in row
        if case.speedup:
            assert fmt.speedup(case.speedup.device_ratio, case.speedup.device_interval) in row
            assert fmt.speedup(case.speedup.call_ratio, case.speedup.call_interval) in row


def test_the_answer_comes_first():
    text = markdown.render(make_report())
    first = plain(text[: text.index("### Speed")])
    assert first.startswith("## ssdprof: ibm-granite/granite-4.0-h-small, 131,072 tokens, NVIDIA H200\n\nPASSED")
    assert "faster than unfused by device time" in first
    assert "rms error against fp64" in first


def test_weights_gpu_and_time_stand_under_the_verdict_and_the_words_are_explained():
    text = markdown.render(make_report())
    origin = "weights: from the hub, revision 0123456789ab, GPU: NVIDIA H200, when: 2026-01-02 03:04 UTC, run: "
    assert text.splitlines()[4].startswith(origin)
    for word, meaning in MEANINGS:
        assert re.search(rf"^\| {word} +\| {re.escape(meaning)}", text, re.MULTILINE)
    assert "token by token" not in text


def test_implementations_of_decode_steps_are_explained_where_they_ran():
    report = make_report()
    recurrent = [case.model_copy(update={"implementation": "recurrent"}) for case in report.cases]
    words = [word for word, _ in meanings(report.model_copy(update={"cases": (*report.cases, *recurrent)}))]
    assert words == ["unfused", "fused", "recurrent", "exact", "relaxed"]


def test_a_partial_run_says_so_at_the_very_top():
    lines = markdown.render(make_report(state="partial")).splitlines()
    assert lines[2].startswith("**PARTIAL")


def test_failures_come_before_the_numbers_that_remain():
    text = markdown.render(make_report(change=lambda c: failed(c, "nonfinite") if c.layer.index == 9 else c))
    assert text.index("### Failures") < text.index("### Speed")
    assert "out[0, 777, 5, 9]" in plain(text)


def test_without_a_gpu_there_is_accuracy_and_no_speed():
    text = plain(markdown.render(make_report(gpu=False)))
    assert "nothing was timed, because this machine has no GPU; kernels ran in Triton's interpreter" in text
    assert "### Speed" not in text
    assert "99.696%" in text
    assert " µs" not in text
    assert " ms" not in text


def test_each_prompt_has_tables_of_its_own():
    text = markdown.render(make_report(seqlens=(131_072, 1024)))
    for tokens in ("131,072", "1,024"):
        assert f"**Speed at {tokens} tokens, sum over 4 layers**" in text
        assert f"**Accuracy of fused's output at {tokens} tokens, 4 layers pooled**" in text


@pytest.mark.slow
def test_the_largest_run_stays_below_the_limit_and_says_what_is_missing():
    report = make_report(layers=range(64), seqlens=(131_072, 16_384, 1024), precisions=ALL_PRECISIONS)
    assert len(report.cases) == 64 * 3 * 12
    text = markdown.render(report)
    assert len(text.encode()) <= 1_000_000 < 1024 * 1024
    last = text.splitlines()[-1]
    assert last.startswith("Left out to stay below 1,000,000 bytes")
    assert 'to "Accuracy of layer 63 (model.layers.63.mamba) at 1,024 tokens"' in last
    assert f"report.json of run {report.run_id}" in last
    assert text.count("<summary>Speed of each layer") == 3  # all speeds are present
    assert text.count("<details>") == text.count("</details>")


def test_a_run_beyond_a_limit_says_what_is_missing():
    report = make_report(layers=range(8), precisions=ALL_PRECISIONS)
    last = markdown.render(report, limit_bytes=40_000).splitlines()[-1]
    assert last.startswith("Left out to stay below 40,000 bytes")
    assert 'to "Accuracy of layer 7 (model.layers.7.mamba)' in last
    assert f"report.json of run {report.run_id}" in last


@pytest.mark.parametrize("limit", [3_000, 8_000, 20_000])
def test_any_limit_is_kept(limit):
    assert len(markdown.render(make_report(), limit_bytes=limit).encode()) <= limit


def test_a_whole_report_leaves_nothing_out():
    text = markdown.render(make_report())
    assert "Left out" not in text
    assert text.count("<summary>Accuracy of layer") == 4


def test_names_cannot_break_the_page():
    report = make_report(
        checkpoint=make_checkpoint(repo_id="a|b<script>*x*`_y_~~$1$"),
        change=lambda c: failed(c, "failed", "x | y\n</details> [a](http://b) *z*") if c.layer.index == 9 else c,
        notes=("- not | a list <b>",),
    )
    text = markdown.render(report)
    rendered = PARSER.render(text)
    assert "<script>" not in rendered
    assert "<b>" not in rendered
    assert "<a " not in rendered
    assert "<em>" not in rendered
    assert rendered.count("</details>") == text.count("<details>")
    reasons = [row[-2] for row in tables(text)[0][1:]]
    assert set(reasons) == {"x | y </details> [a](http://b) *z*"}


def test_escape():
    assert markdown.escape("a <b> & c\n d") == "a &lt;b&gt; &amp; c d"
    assert markdown.escape("_x_ a_b 2.1x [2.0, 2.2] [u](v) `c` | $1$") == (
        r"\_x\_ a_b 2.1x [2.0, 2.2] [u\](v) \`c\` \| \$1\$"
    )


def test_numbers_and_units_do_not_part():
    report = make_report(layers=(0,), precisions=(EXACT_FP32,))
    duration = fmt.duration(report.cases[-1].timing.device_median_us)
    assert duration.replace(" ", "\u00a0") in markdown.render(report)
