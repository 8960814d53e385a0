import hashlib
import json
import struct
from pathlib import Path

import pytest

from ssdprof.capture import prompt as prompts
from ssdprof.capture.prompt import _pieces, build_prompt, default_text, held_out_text, training_text
from ssdprof.checkpoint.names import DEMO_FOLDERS
from ssdprof.core.base import LONGEST_SEQLEN
from ssdprof.errors import BadInputError, ExitCode
from ssdprof.jobs.reading import parse_seqs

DEMO = DEMO_FOLDERS["demo"]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    """A BPE tokenizer with merges and with a special token before every text, as many checkpoints
    have.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([default_text()[:50_000].decode()], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(folder)
    return folder


# --- --seq


@pytest.mark.parametrize(
    ("seqs", "lengths"),
    [
        ("1", (1,)),
        ("16384", (16384,)),
        ("16k", (16384,)),
        ("128K", (131072,)),
        ("1m", (1048576,)),
        ("16m", (LONGEST_SEQLEN,)),
        ("16k, 1k,512,1024", (16384, 1024, 512)),
    ],
)
def test_lengths_are_numbers_or_multiples_of_1024_each_once(seqs, lengths):
    assert parse_seqs(seqs) == lengths


NO_LENGTHS = [
    "0",
    "0k",
    "-5",
    "128q",
    "",
    " ",
    "k",
    "1.5k",
    "1e3",
    "١٢",
    "0x10",
    "1 k",
    "17m",
    "9" * 5000,
]


@pytest.mark.parametrize("seqs", [*NO_LENGTHS, "1k,", ",1k", "1k,,2k", "1k;2k", "1k,0"])
def test_anything_else_is_refused_with_a_hint(seqs):
    with pytest.raises(BadInputError) as error:
        parse_seqs(seqs)
    assert error.value.exit_code == ExitCode.BAD_INPUT
    assert "128k" in error.value.hint


# --- the default text


def test_the_default_text_suffices_for_128k_tokens_of_tokenizers_that_split_at_white_space():
    assert len(default_text().decode().split()) > 131072


def test_held_out_and_training_parts_are_the_whole_text():
    assert held_out_text() + training_text() == default_text()
    held_out_text().decode()


def test_a_damaged_text_is_refused(tmp_path, monkeypatch):
    whole = (prompts._TEXT / "text.txt.xz").read_bytes()
    monkeypatch.setattr(prompts, "_TEXT", tmp_path)
    for data in (whole[:1000], b""):
        (tmp_path / "text.txt.xz").write_bytes(data)
        with pytest.raises(BadInputError, match="damaged"):
            default_text()


def test_the_default_text_is_the_published_one_with_its_licence():
    folder = prompts._TEXT
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in (folder / "LICENSE").read_text()
    digest = hashlib.sha256(default_text()).hexdigest()
    assert (folder / "text.sha256").read_text().split()[0] == digest
    assert digest in (folder / "README.md").read_text()


# --- prompts


def test_the_default_prompt_of_the_demo_tokenizer_is_the_text_byte_by_byte():
    ids, prompt = build_prompt(DEMO, 1000)
    assert bytes(ids[0].tolist()) == default_text()[:1000]
    assert prompt.kind == "default"
    assert prompt.seqlen == 1000
    assert prompt.batch == 1


def test_a_prompt_is_the_start_of_the_whole_text_its_special_token_and_its_hash(
    tokenizer_folder: Path,
):
    from transformers import AutoTokenizer

    whole = AutoTokenizer.from_pretrained(tokenizer_folder)(default_text()[:200_000].decode())[
        "input_ids"
    ]
    assert (whole[0], 0 in whole[1:]) == (0, False)
    for seqlen in (1, 100, 5000):
        ids, prompt = build_prompt(tokenizer_folder, seqlen)
        assert ids.tolist() == [whole[:seqlen]]
        assert (
            prompt.token_sha256
            == hashlib.sha256(struct.pack(f"<{seqlen}q", *ids[0].tolist())).hexdigest()
        )


@pytest.mark.parametrize(
    ("letters", "seqlen"),
    # far longer than expected; and: the first read ends inside the last required word
    [(60, 299), (8, 8)],
)
def test_it_reads_on_until_the_last_token_is_certain(tmp_path, letters, seqlen):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a" * letters: 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "long.txt").write_text(("a" * letters + " ") * 300)
    ids, _ = build_prompt(tmp_path, seqlen, kind="file", file=tmp_path / "long.txt")
    assert ids.tolist() == [[1] * seqlen]


def test_a_file_prompt_is_the_file_without_its_byte_order_mark(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_bytes(b"\xef\xbb\xbf" + "naïve text".encode())
    ids, prompt = build_prompt(DEMO, 11, kind="file", file=file)
    assert bytes(ids[0].tolist()) == "naïve text".encode()
    assert prompt.kind == "file"
    assert prompt.source == "the user's file mine.txt"


@pytest.mark.parametrize(
    ("lengths", "hint"),
    [
        ({"seqlen": 100}, "Ask for at most --seq 46, "),
        ({"seqlen": 100, "batch": 4}, "Ask for fewer or shorter sequences, "),
        ({"seqlen": 150, "packed": (100, 50)}, "Ask for fewer or shorter sequences, "),
    ],
)
def test_the_hint_for_too_short_a_file_says_what_fits(tmp_path, lengths, hint):
    file = tmp_path / "short.txt"
    file.write_text("x" * 46)  # the demo's tokens are bytes
    with pytest.raises(BadInputError, match=r"it gives 46 tokens .* are needed") as error:
        build_prompt(DEMO, kind="file", file=file, **lengths)
    assert error.value.hint.startswith(hint)
    build_prompt(DEMO, 46, kind="file", file=file)


def test_the_default_text_can_be_too_short_as_well():
    with pytest.raises(
        BadInputError, match="The default text is too short: it gives 1,001,975 tokens"
    ):
        build_prompt(DEMO, 2**20)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"  \n\n\t ", "empty"),
        (bytes(range(128, 256)) * 10, "not UTF-8"),
        (None, "No such file"),
        ("folder", "directory"),
    ],
)
def test_a_file_that_gives_no_text_is_refused(tmp_path, content: bytes | str | None, message):
    file = tmp_path if content == "folder" else tmp_path / "mine.txt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    with pytest.raises(BadInputError, match=message) as error:
        build_prompt(DEMO, 4, kind="file", file=file)
    assert error.value.hint


def test_a_file_and_another_kind_exclude_each_other(tmp_path):
    with pytest.raises(BadInputError):
        build_prompt(DEMO, 4, kind="file")
    with pytest.raises(BadInputError):
        build_prompt(DEMO, 4, kind="random", file=tmp_path / "mine.txt")


def test_random_prompts_follow_the_seed_and_leave_special_tokens_out(tokenizer_folder: Path):
    first, prompt = build_prompt(tokenizer_folder, 20_000, kind="random", seed=1)
    again, _ = build_prompt(tokenizer_folder, 20_000, kind="random", seed=1)
    other, _ = build_prompt(tokenizer_folder, 20_000, kind="random", seed=2)
    assert first.equal(again)
    assert not first.equal(other)
    assert set(first[0].tolist()) == set(range(1, 600))
    assert "seed 1" in prompt.source
    assert "not those of text" in prompt.source


# --- tokenizers


def test_the_record_names_the_tokenizer_by_content_and_holds_no_path(
    tokenizer_folder: Path, tmp_path
):
    _, prompt = build_prompt(tokenizer_folder, 5)
    digest = hashlib.sha256((tokenizer_folder / "tokenizer.json").read_bytes()).hexdigest()
    assert digest[:12] in prompt.tokenizer
    assert "600 tokens" in prompt.tokenizer
    file = tmp_path / "mine.txt"
    file.write_text("some text of mine")
    _, prompt = build_prompt(tokenizer_folder, 5, kind="file", file=file)
    assert str(tmp_path) not in prompt.model_dump_json()


@pytest.mark.parametrize(
    "settings",
    [
        {
            "tokenizer_class": "OurTokenizer",
            "auto_map": {"AutoTokenizer": ["custom.OurTokenizer", None]},
        },
        None,
    ],
)
def test_tokenizer_json_alone_is_enough_and_no_remote_code_runs(
    tokenizer_folder: Path, tmp_path, settings: dict[str, object] | None
):
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    (tmp_path / "custom.py").write_text("raise SystemExit('remote code ran')\n")
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert build_prompt(tmp_path, 100)[0].equal(build_prompt(tokenizer_folder, 100)[0])


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(BadInputError, match="no tokenizer") as error:
        build_prompt(tmp_path, 4)
    assert "--tokenizer" in error.value.hint


# --- several prompts


def test_a_batch_and_a_pack_are_cut_from_the_text_each_with_its_special_token(
    tokenizer_folder: Path,
):
    alone = build_prompt(tokenizer_folder, 30)[0][0].tolist()
    ids, prompt = build_prompt(tokenizer_folder, 10, batch=3)
    assert ids.tolist() == [[0, *alone[start : start + 9]] for start in (1, 10, 19)]
    assert (prompt.seqlen, prompt.batch) == (10, 3)
    assert "3 pieces of it one after the other" in prompt.source
    ids, prompt = build_prompt(tokenizer_folder, 11, packed=(5, 1, 5))
    assert ids.tolist() == [[0, *alone[1:5], 0, 0, *alone[5:9]]]
    assert prompt.seqlen == 11


def test_a_token_behind_a_text_does_not_keep_that_in_front_from_every_row():
    class Both:
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [0, *map(ord, text), 1]}

    ids, _ = _pieces(Both(), Both()("abcdef")["input_ids"][:6], (3, 3))
    assert ids == [0, *b"ab", 0, *b"cd"]
    ids, _ = _pieces(Both(), Both()("abcdefgh")["input_ids"][:9], (6, 2, 2, 6))
    assert ids == [0, *b"abcde", 0, *b"b", 0, *b"c", 0, *b"defgh"], "short pieces differ, too"


def test_pieces_of_a_short_text_overlap_and_differ(tokenizer_folder: Path, tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(default_text()[:400])
    ids, prompt = build_prompt(tokenizer_folder, 60, kind="file", file=file, batch=5)
    assert len({tuple(row) for row in ids.tolist()}) == 5
    assert "5 pieces of it that overlap" in prompt.source


def test_random_tokens_take_no_room_for_their_vocabulary():
    ids, _ = build_prompt(None, 100, kind="random", vocab_size=10**12)
    assert int(ids.max()) < 10**12
    assert len(set(ids[0].tolist())) == 100


def test_a_batch_of_random_tokens(tokenizer_folder: Path):
    ids, _ = build_prompt(tokenizer_folder, 8, kind="random", batch=4)
    assert ids.shape == (4, 8)
    assert len({tuple(row) for row in ids.tolist()}) == 4
