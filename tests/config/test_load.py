"""Reading settings: what is accepted, and that every mistake is reported at once, where it stands."""

import pathlib

import hypothesis
import pytest
from hypothesis import strategies as st

from ringjax.config import Config, ConfigError, MeshConfig, dump_config, load_config, sections, settings

QUICKSTART = pathlib.Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load settings from the text of a file called x.yaml."""
    monkeypatch.chdir(tmp_path)

    def from_text(text: str | bytes, *overrides: str) -> Config:
        pathlib.Path("x.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_config("x.yaml", overrides)

    return from_text


@pytest.fixture
def problems(load):
    """The problems reported for the text of a file called x.yaml."""

    def of_text(text: str | bytes, *overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(text, *overrides)
        assert str(caught.value).splitlines() == list(caught.value.problems)
        return list(caught.value.problems)

    return of_text


# What is accepted


@pytest.mark.parametrize("text", ["", "# nothing\n", "null\n", "{}\n", "---\n", "model:\n", "model: {}\n"])
def test_nothing_set_means_the_defaults(load, text):
    assert load(text) == Config()


def test_file_and_overrides_are_laid_over_the_defaults(load):
    config = load("mesh:\n  seq: 4\noptim:\n  lr: 0.5\n", "mesh.seq=2", "train.steps=30")
    assert config == Config().model_copy(
        update={
            "mesh": MeshConfig(seq=2),
            "optim": Config().optim.model_copy(update={"lr": 0.5}),
            "train": Config().train.model_copy(update={"steps": 30}),
        }
    )


def test_last_of_two_overrides_counts(load):
    assert load("", "train.steps=30", "train.steps=40").train.steps == 40


def test_override_repairs_a_wrong_value_in_the_file(load):
    assert load("mesh: {seq: many}", "mesh.seq=2").mesh.seq == 2


@pytest.mark.parametrize(
    ("written", "value"),
    [("1e-4", 1e-4), ("1E4", 1e4), ("+1e+4", 1e4), ("3", 3.0), (".5", 0.5), ("1_000.5", 1000.5), ("1.", 1.0)],
)
def test_numbers_in_every_spelling(load, written, value):
    for config in (load(f"optim: {{lr: {written}}}"), load("", f"optim.lr={written}")):
        assert config.optim.lr == value
        assert isinstance(config.optim.lr, float)


@pytest.mark.parametrize("written", ["2024-01-01", "12:30:01", "010", "0x10", "1e4x", "a=b", "'no'", '"1e4"', "<<"])
def test_text_that_only_looks_like_something_else(load, written):
    assert load(f"run:\n  dir: {written}\n").run.dir == written.strip("'\"")
    assert load("", f"run.dir={written}").run.dir == written.strip("'\"")


def test_pattern_needs_no_quotes_on_the_command_line(load):
    config = load("", "data.source=text", "data.path=books", "data.pattern=**/*.md")
    assert config.data.pattern == "**/*.md"


@pytest.mark.parametrize("written", ["null", "~", ""])
def test_null_unsets(load, written):
    assert load("optim: {clip_norm: 2.0}", f"optim.clip_norm={written}").optim.clip_norm is None


@pytest.mark.parametrize(("written", "value"), [("yes", True), ("off", False), ("true", True)])
def test_truth_values(load, written, value):
    assert load(f"model: {{tied_embeddings: {written}}}").model.tied_embeddings is value


def test_windows_line_ends_and_byte_order_mark(load):
    assert load(b"\xef\xbb\xbfmesh:\r\n  seq: 2\r\n").mesh.seq == 2


def test_quickstart_is_valid():
    config = load_config(QUICKSTART)
    assert config.mesh.seq >= 4
    assert config.data.seq_len >= 4096


# What is refused


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model:\n  haeds: 8\n", "x.yaml:2: model.haeds: unknown key; did you mean model.heads?"),
        ("model:\n  seq_len: 8\n", "x.yaml:2: model.seq_len: unknown key; did you mean data.seq_len?"),
        ("optim:\n  warmup: 8\n", "x.yaml:2: optim.warmup: unknown key; did you mean optim.warmup_steps?"),
        (
            "mesh: {zzz: 8}\n",
            "x.yaml:1: mesh.zzz: unknown key; mesh has stage, data, fsdp, seq, tensor, ring_may_cross",
        ),
        ("\nmodle: {heads: 8}\n", "x.yaml:2: modle: unknown section; did you mean model?"),
        ("seq_len: 8\n", "x.yaml:1: seq_len: unknown section; did you mean data.seq_len?"),
        (
            "model.heads: 8\n",
            "x.yaml:1: model.heads: unknown section; write heads on a line of its own under model:",
        ),
        ("zzz: 8\n", f"x.yaml:1: zzz: unknown section; the sections are {', '.join(sections())}"),
        ("on: 8\n", f"x.yaml:1: on: unknown section; the sections are {', '.join(sections())}"),
        (
            "mesh: {<<: {seq: 4}}\n",
            "x.yaml:1: mesh.<<: unknown key; mesh has stage, data, fsdp, seq, tensor, ring_may_cross",
        ),
        ("? [a]\n: 8\n", "x.yaml:1: a key must be a name, got a list"),
        ("run:\n  seed: 1\n  seed: 2\n", "x.yaml:3: run.seed: set twice, first on line 2; keep one of them"),
        ("run: {seed: 1}\nrun: {}\n", "x.yaml:2: run: set twice, first on line 1; keep one of them"),
        ("mesh: 4\n", "x.yaml:1: mesh: needs settings under it, got a single value"),
        ("mesh:\n- 4\n", "x.yaml:2: mesh: needs settings under it, got a list"),
        ("- mesh\n", "x.yaml:1: needs sections of settings, got a list"),
        ("just text\n", "x.yaml:1: needs sections of settings, got a single value"),
    ],
)
def test_wrong_structure(problems, text, expected):
    assert problems(text) == [expected]


@pytest.mark.parametrize(
    ("key", "written", "expected"),
    [
        ("mesh.seq", "five", "must be an integer >= 1, got 'five' (text)"),
        ("mesh.seq", "'4'", "must be an integer >= 1, got '4' (text)"),
        ("mesh.seq", "010", "must be an integer >= 1, got '010' (text)"),
        ("mesh.seq", "1:30", "must be an integer >= 1, got '1:30' (text)"),
        ("mesh.seq", "1e2", "must be an integer >= 1, got 1e2 (number)"),
        ("mesh.seq", "2.0", "must be an integer >= 1, got 2.0 (number)"),
        ("mesh.seq", "0", "must be an integer >= 1, got 0 (integer)"),
        ("mesh.seq", "true", "must be an integer >= 1, got true (truth value)"),
        ("mesh.seq", "null", "must be an integer >= 1, got null"),
        ("mesh.seq", "[1, 2]", "must be an integer >= 1, got [1, 2] (list)"),
        ("mesh.seq", "{a: 1}", "must be an integer >= 1, got {'a': 1} (mapping)"),
        ("mesh.stage", "0", "must be an integer >= 1, got 0 (integer)"),
        (
            "model.window",
            "[8, 0]",
            "must be an integer >= 1 or a list, each an integer >= 1 or null, or null, got [8, 0] (list)",
        ),
        ("model.vocab_size", "0", "must be an integer >= 1 or null, got 0 (integer)"),
        ("optim.lr", "0", "must be a number > 0, got 0 (integer)"),
        ("optim.lr", ".inf", "must be a number > 0, got .inf (number)"),
        ("optim.lr", "1e999", "must be a number > 0, got 1e999 (number)"),
        ("optim.b1", "1", "must be a number >= 0 and < 1, got 1 (integer)"),
        ("optim.b1", "on", "must be a number >= 0 and < 1, got on (which YAML reads as true)"),
        ("model.tied_embeddings", "'yes'", "must be true or false, got 'yes' (text)"),
        ("model.tied_embeddings", "1", "must be true or false, got 1 (integer)"),
        ("run.dir", "''", "must be non-empty text, got '' (text)"),
        (
            "run.dir",
            "no",
            "must be non-empty text, got no (which YAML reads as false); write it in quotes to make it text",
        ),
        ("run.dir", "7", "must be non-empty text, got 7 (integer); write it in quotes to make it text"),
        (
            "attention.layout",
            "zig-zag",
            "must be one of contiguous, zigzag, striped, got 'zig-zag' (text); did you mean zigzag?",
        ),
        ("optim.lr", "9" * 5000, "cannot be read as a value"),
        ("optim.lr", "9" * 400, f"must be a number > 0, got {'9' * 57}... (integer)"),
    ],
)
def test_wrong_values_in_the_file_and_on_the_command_line(problems, key, written, expected):
    section, name = key.split(".")
    assert problems(f"# a comment\n{section}:\n  {name}: {written}\n") == [f"x.yaml:3: {key}: {expected}"]
    assert problems("", f"{key}={written}") == [f"command line: {key}={written}: {expected}"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("mesh.seq", "an override is written key.path=value, as mesh.seq=4"),
        ("=4", "an override is written key.path=value, as mesh.seq=4"),
        ("", "an override is written key.path=value, as mesh.seq=4"),
        ("mesh={seq: 4}", "mesh is a section; set its settings one by one, as mesh.stage=..."),
        ("mesh.sqe=4", "unknown key; did you mean mesh.seq?"),
        ("seq=4", "unknown section; did you mean mesh.seq?"),
        ("mehs.seq=4", "unknown section; did you mean mesh.seq?"),
        ("mesh.seq.x=4", "unknown key; did you mean mesh.seq?"),
        ("mesh.seq=[", "not valid YAML: expected the node content, but found '<stream end>'"),
        ("mesh.seq=\x00", "not valid YAML: the character '\\x00' is not allowed"),
    ],
)
def test_wrong_overrides(problems, override, expected):
    (problem,) = problems("", override)
    assert problem.startswith(f"command line: {override}")
    assert problem.endswith(f": {expected}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mesh:\n  seq: 4\n tensor: 2\n", "x.yaml:3: not valid YAML: "),
        ("mesh:\n\tseq: 4\n", "x.yaml:2: not valid YAML: found character '\\t'"),
        ("mesh: [\n", "x.yaml:2: not valid YAML: "),
        ("mesh: {}\n---\nrun: {}\n", "x.yaml:2: not valid YAML: but found another document"),
        ("data:\n  pattern: *.md\n", "x.yaml:2: not valid YAML: "),
        ("mesh: {}\n# \x07\n", "x.yaml:2: not valid YAML: "),
        ("mesh: &m {seq: 2}\nmodel: *m\n", "x.yaml:1: YAML anchors and aliases (m) are not accepted"),
        ("mesh: *m\n", "x.yaml:1: YAML anchors and aliases (m) are not accepted"),
        ("mesh: &m {seq: *m}\n", "x.yaml:1: YAML anchors and aliases (m) are not accepted"),
        ("run:\n  dir: !!python/object/apply:os.getcwd []\n", "x.yaml:2: YAML tags (tag:yaml.org,2002:python/"),
        ("run: !!python/name:os.system\n", "x.yaml:1: YAML tags (tag:yaml.org,2002:python/"),
        ("run:\n  seed: !!int x\n", "x.yaml:2: YAML tags (tag:yaml.org,2002:int) are not accepted"),
        ("run:\n  seed: " + "[" * 5000, "x.yaml:2: nested more than "),
        (b"mesh:\n  seq: 2 # \xff\n", "x.yaml:2: not UTF-8 text (byte 0xff)"),
        ("mesh: {}\n".encode("utf-16"), "x.yaml:1: not UTF-8 text (byte 0xff)"),
    ],
)
def test_files_that_are_not_settings_at_all(problems, text, expected):
    (problem,) = problems(text, "mesh.seq=5")  # nothing is said about combinations with what could not be read
    assert problem.startswith(expected)


def test_pattern_in_a_file_is_told_to_use_quotes(problems):
    (problem,) = problems("data:\n  pattern: **/*.md\n")
    assert problem.endswith("a value that starts with * needs quotes")


def test_missing_file_names_the_nearest(load):
    load("")
    with pytest.raises(ConfigError) as caught:
        load_config("xx.yaml", ["mesh.sqe=4"])
    assert caught.value.problems == (
        "xx.yaml: no such file; did you mean x.yaml?",
        "command line: mesh.sqe=4: unknown key; did you mean mesh.seq?",
    )


def test_missing_folder_and_folder_in_place_of_a_file(tmp_path):
    with pytest.raises(ConfigError, match=r"no such file$"):
        load_config(tmp_path / "none" / "x.yaml")
    with pytest.raises(ConfigError, match="is a folder; give the YAML file itself"):
        load_config(tmp_path)


def test_unreadable_file(load, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    load("")
    monkeypatch.setattr(pathlib.Path, "read_bytes", refuse)
    with pytest.raises(ConfigError, match=r"^x.yaml: cannot be read: Permission denied$"):
        load_config("x.yaml")


def test_all_problems_at_once_in_the_order_of_the_lines(problems):
    text = "train:\n  steps: 0\nmesh:\n  sqe: 2\nrun:\n  seed: -1\nmodel:\n  head_dim: 7\n"
    assert [problem.split(": ")[:2] for problem in problems(text, "train.keep=0", "nonsense")] == [
        ["x.yaml:2", "train.steps"],
        ["x.yaml:4", "mesh.sqe"],
        ["x.yaml:6", "run.seed"],
        ["x.yaml:8", "model.head_dim"],
        ["command line", "nonsense"],
        ["command line", "train.keep=0"],
    ]


def test_impossible_combination_points_to_the_setting_in_the_file(problems):
    (problem,) = problems("model:\n  kv_heads: 3\n")
    assert problem.startswith("x.yaml:2: model.kv_heads: model.heads: 4 is not a multiple of model.kv_heads = 3")


def test_impossible_combination_points_to_the_override_that_made_it(problems):
    (problem,) = problems("data:\n  seq_len: 4090\nmesh:\n  seq: 1\n", "mesh.seq=4")
    assert problem.startswith("command line: mesh.seq=4: data.seq_len: 4090 does not fit mesh.seq = 4")


def test_combinations_with_a_misspelt_or_wrong_setting_are_left_alone(problems):
    assert len(problems("model:\n  haeds: 6\n  kv_heads: 3\n")) == 1
    assert len(problems("model:\n  heads: six\n  kv_heads: 3\n")) == 1
    assert len(problems("modle:\n  heads: 6\nmesh:\n  seq: 3\ndata:\n  seq_len: 6\n")) == 1


# Writing


def _legal(setting):
    """Legal values of a setting, as the schema allows them one by one."""
    plain = {
        "an integer >= 1": st.integers(1, 2**31 - 1),
        "an integer >= 0": st.integers(0, 2**31 - 1),
        "true or false": st.booleans(),
        "text": st.text(),
        "non-empty text": st.text(min_size=1),
    }
    if setting.key == "model.window":
        count = plain["an integer >= 1"]
        return st.none() | count | st.lists(st.none() | count, min_size=1, max_size=4).map(tuple)
    number = st.floats(min_value=0, exclude_min=True, max_value=1, exclude_max=True)
    if setting.key in COMBINED:
        return st.just(setting.default)
    if setting.choices:
        return st.sampled_from(setting.choices)
    requirement = setting.requirement.removesuffix(" or null")
    values = plain.get(requirement, number if requirement.startswith("a number") else st.just(setting.default))
    return st.none() | values if requirement != setting.requirement else values


# Settings with rules between them; the other settings are free.
COMBINED = {
    *(f"mesh.{axis}" for axis in ("stage", "data", "fsdp", "seq", "tensor")),
    *(f"model.{name}" for name in ("dim", "heads", "kv_heads", "head_dim", "mlp_dim")),
    *("data.batch", "data.seq_len", "data.source", "data.path", "data.pattern"),
    *("optim.accumulate", "train.microbatches", "train.rounds", "train.offload"),
    *(f"processes.{name}" for name in ("detect", "count", "index", "coordinator")),
}


@hypothesis.settings(deadline=None)
@hypothesis.given(st.fixed_dictionaries({key: _legal(setting) for key, setting in settings().items()}))
def test_what_is_written_reads_back_equal(tmp_path_factory, values):
    tree: dict[str, dict] = {}
    for key, value in values.items():
        section, name = key.split(".")
        tree.setdefault(section, {})[name] = value
    config = Config.model_validate(tree)
    path = tmp_path_factory.getbasetemp() / "round.yaml"
    path.write_text(dump_config(config), encoding="utf-8", newline="")
    assert load_config(path) == config


@hypothesis.settings(deadline=None)
@hypothesis.example("\x85")
@hypothesis.example("a\u2028b\n c ")
@hypothesis.given(st.text(min_size=1) | st.from_regex(r"[-+.0-9eE_:xob]+", fullmatch=True))
def test_any_text_reads_back_as_text(tmp_path_factory, text):
    config = Config().model_copy(update={"run": Config().run.model_copy(update={"dir": text})})
    path = tmp_path_factory.getbasetemp() / "text.yaml"
    path.write_text(dump_config(config), encoding="utf-8", newline="")
    assert load_config(path).run.dir == text
