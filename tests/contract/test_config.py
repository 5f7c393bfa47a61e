"""Settings: precedence, types, origins, and errors that name the place to correct."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from contract.config import REQUIRED, Field, check_inputs, find_file, load_toml, resolve
from contract.errors import ConfigError

FIELDS = [
    Field("server", str, REQUIRED, "the server's address"),
    Field("data", Path, None, "the folder of images"),
    Field("alpha", float, 0.1, "strength of the weight noise"),
    Field("threads", int, 1, "engine threads"),
    Field("checkerboard", bool, False, "send half of the patches"),
    Field("classes", tuple, None, "class names"),
    Field("extras", dict, None, "a table"),
    Field("site_secret", str, None, "the secret of the site", secret=True),
]


def write(folder: Path, text: str) -> Path:
    path = folder / "cutlayer.toml"
    path.write_text(text, encoding="utf-8")
    return path


def settle(flags: dict[str, Any] | None = None, environ: dict[str, str] | None = None, file: Path | None = None) -> Any:
    return resolve("device", FIELDS, {"server": "wss://x", **(flags or {})}, environ or {}, file)


@pytest.mark.parametrize(("flag", "variable", "key"), list(itertools.product([True, False], repeat=3)))
def test_flag_beats_environment_beats_file_beats_default(flag: bool, variable: bool, key: bool, tmp_path: Path) -> None:
    file = write(tmp_path, "[device]\nalpha = 0.3\n" if key else "[device]\n")
    settled = settle(
        {"alpha": 0.5 if flag else None}, {"CUTLAYER_DEVICE_ALPHA": "0.4", "OTHER": "1"} if variable else {}, file
    )
    expected = next(
        pair
        for there, pair in [
            (flag, (0.5, "--alpha")),
            (variable, (0.4, "CUTLAYER_DEVICE_ALPHA")),
            (key, (0.3, f"[device] alpha in {file}")),
            (True, (0.1, "default")),
        ]
        if there
    )
    assert (settled.values["alpha"], settled.origin["alpha"]) == expected


def test_every_type_reads_alike_from_flag_environment_and_file(tmp_path: Path) -> None:
    expected = {
        "data": Path("images"),
        "alpha": 1.0,
        "threads": 2,
        "checkerboard": True,
        "classes": ("a", "b"),
        "extras": {"img_size": 64},
    }
    texts = {
        "data": "images",
        "alpha": "1",
        "threads": "2",
        "checkerboard": "Yes",
        "classes": "a, b",
        "extras": "{img_size = 64}",
    }
    file = write(
        tmp_path,
        '[device]\ndata = "images"\nalpha = 1\nthreads = 2\ncheckerboard = true\nclasses = ["a", "b"]\n'
        "[device.extras]\nimg_size = 64\n",
    )
    from_environment = settle(None, {f"CUTLAYER_DEVICE_{name.upper()}": text for name, text in texts.items()})
    from_file = settle(None, None, file)
    for settled in (settle(texts), settle(expected), from_environment):
        assert {name: settled.values[name] for name in expected} == expected
    assert {name: from_file.values[name] for name in expected} == {**expected, "data": tmp_path / "images"}
    assert type(from_file.values["alpha"]) is float


def test_absolute_paths_in_a_file_stay(tmp_path: Path) -> None:
    file = write(tmp_path, '[device]\ndata = "/images"\n')
    assert settle(None, None, file).values["data"] == Path("/images")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("alpha = '0.1'", "alpha in FILE must be a finite number, found '0.1'"),
        ("alpha = nan", "alpha in FILE must be a finite number, found nan"),
        ("alpha = 1" + "0" * 400, "alpha in FILE must be a finite number, found 1000"),
        ("alpha = true", "alpha in FILE must be a finite number, found True, true or false"),
        ("threads = 1.5", "threads in FILE must be an integer, found 1.5, a finite number"),
        ("threads = true", "threads in FILE must be an integer, found True"),
        ("checkerboard = 1", "checkerboard in FILE must be true or false, found 1, an integer"),
        ("classes = 'a'", "classes in FILE must be a list of strings, found 'a'"),
        ("classes = [1]", "classes in FILE must be a list of strings"),
        ("data = 3", "data in FILE must be a path, found 3, an integer"),
        ("data = ''", "data in FILE must be a path, found ''"),
        ("extras = 3", "extras in FILE must be a table, found 3"),
        ("server = ''", "server in FILE must be a string, found ''"),
    ],
)
def test_wrong_types_in_a_file_are_named(line: str, text: str, tmp_path: Path) -> None:
    file = write(tmp_path, f"[device]\n{line}\n")
    with pytest.raises(ConfigError) as error:
        resolve("device", FIELDS, {} if line.startswith("server") else {"server": "wss://x"}, {}, file)
    assert f"[device] {text}".replace("FILE", str(file)) in error.value.cause


def test_help_tells_the_default_where_there_is_one() -> None:
    described = [Field("x", kind, default, "help").described for kind, default in (
        (int, 3), (float, 0.5), (str, "a"), (tuple, ("a", "b")), (Path, Path("runs")), (str, None), (str, REQUIRED),
        (bool, False), (str, ""), (dict, {}), (tuple, ()),
    )]  # fmt: skip
    assert described[:5] == [f"help (default: {each})" for each in ("3", "0.5", "a", "a,b", "runs")]
    assert set(described[5:]) == {"help"}


def test_what_is_no_number_is_not_found_to_be_one() -> None:
    with pytest.raises(ConfigError) as error:
        settle(None, {"CUTLAYER_DEVICE_ALPHA": "nan"})
    assert error.value.cause == "CUTLAYER_DEVICE_ALPHA must be a finite number, found nan"


@pytest.mark.parametrize(
    ("name", "text"),
    [("alpha", "much"), ("alpha", "inf"), ("threads", "1.5"), ("checkerboard", "perhaps"), ("extras", "x = }")],
)
def test_wrong_texts_in_the_environment_are_named(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"CUTLAYER_DEVICE_{name.upper()} must be"):
        settle(None, {f"CUTLAYER_DEVICE_{name.upper()}": text})


def test_a_missing_required_value_names_all_three_places(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        resolve("device", FIELDS, {}, {}, None)
    assert error.value.cause == "server is not set (the server's address)"
    assert error.value.cure == (
        "give --server, set CUTLAYER_DEVICE_SERVER, or put server under [device] in cutlayer.toml"
    )


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("[device]\nsevrer = 'x'\n", "unknown key sevrer (did you mean 'server'?)"),
        ("[devcie]\nalpha = 1\n", "devcie (did you mean 'device'?)"),
        ("alpha = 0.1\n", "a key outside of sections: alpha"),
        ("device = 1\n", "device in FILE must be a section, found 1"),
        ("[device\n", "FILE is not valid TOML"),
        ("[device]\nalpha = 1" + "0" * 5000, "FILE is not valid TOML"),
        ("[device]\nextras = " + "[" * 5000, "FILE is not valid TOML"),
    ],
)
def test_unknown_names_in_a_file_are_refused(text: str, cause: str, tmp_path: Path) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        settle(None, None, file)
    assert cause.replace("FILE", str(file)) in error.value.cause


def test_a_misspelt_environment_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'CUTLAYER_DEVICE_ALPHA'"):
        settle(None, {"CUTLAYER_DEVICE_ALFA": "0.5"})


def test_an_empty_environment_variable_counts_as_not_set() -> None:
    assert settle(None, {"CUTLAYER_DEVICE_ALPHA": ""}).origin["alpha"] == "default"


def test_other_sections_are_left_alone(tmp_path: Path) -> None:
    file = write(tmp_path, "[server]\nlisten = '0.0.0.0:8443'\n")
    assert settle(None, {"CUTLAYER_SERVER_LISTEN": "x", "CUTLAYER_DEBUG": "1"}, file).values["alpha"] == 0.1


def test_show_config_says_where_each_value_came_from_and_is_toml(tmp_path: Path) -> None:
    file = write(tmp_path, "[device]\nclasses = ['a \"b\"', 'c\\d']\n")
    settled = settle({"alpha": 0.2, "site_secret": "hunter2"}, {"CUTLAYER_DEVICE_CHECKERBOARD": "on"}, file)
    shown = settled.show()
    assert shown.splitlines() == [
        "[device]",
        'server = "wss://x"  # --server',
        "# data is not set",
        "alpha = 0.2  # --alpha",
        "threads = 1  # default",
        "checkerboard = true  # CUTLAYER_DEVICE_CHECKERBOARD",
        f'classes = ["a \\"b\\"", "c\\\\d"]  # [device] classes in {file}',
        "# extras is not set",
        'site_secret = "(hidden)"  # --site-secret',
    ]
    again = load_toml(write(tmp_path, shown))["device"]
    assert again["classes"] == ['a "b"', "c\\d"] and again["alpha"] == 0.2


def test_a_secret_of_the_wrong_type_is_not_printed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        settle(None, None, write(tmp_path, "[device]\nsite_secret = 123456\n"))
    assert "123456" not in error.value.cause + error.value.cure


def test_the_file_is_the_given_one_else_the_first_that_exists(tmp_path: Path) -> None:
    assert find_file(None, tmp_path) is None
    general = write(tmp_path, "")
    assert find_file(None, tmp_path, ("edge.toml", "cutlayer.toml")) == general
    edge = tmp_path / "edge.toml"
    edge.touch()
    assert find_file(None, tmp_path, ("edge.toml", "cutlayer.toml")) == edge
    assert find_file(general, tmp_path, ("edge.toml",)) == general
    with pytest.raises(ConfigError, match="there is no configuration file"):
        find_file(tmp_path / "none.toml", tmp_path)


@pytest.mark.parametrize("data", [b"a = '\xff'", b"#" * ((1 << 20) + 1)], ids=["not UTF-8", "too large"])
def test_a_file_that_is_no_toml_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cutlayer.toml"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"cutlayer\.toml"):
        load_toml(path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_toml(tmp_path)


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "cutlayer.toml"
    path.write_bytes(b"\xef\xbb\xbf[device]\nalpha = 0.2\n")
    assert load_toml(path) == {"device": {"alpha": 0.2}}


def test_a_folder_is_no_configuration_file_and_is_called_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--config should name a file, .* is a folder") as caught:
        find_file(tmp_path, tmp_path, ("edge.toml", "cutlayer.toml"))
    assert str(tmp_path / "edge.toml") in caught.value.cure


@pytest.mark.parametrize(
    ("reads", "name", "cause"),
    [
        ("file", "none", "there is no file none (table)"),
        ("folder", "none", "there is no folder none (table)"),
        ("file", "folder", "folder is a folder, expected a file (table)"),
        ("folder", "file", "file is a file, expected a folder (table)"),
        ("file", "file", ""),
        ("folder", "folder", ""),
    ],
)
def test_what_settings_name_is_looked_for(
    reads: str, name: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").touch()
    fields = [Field("table", Path, None, "a table", reads=reads), Field("other", Path, None, "another", reads="file")]
    resolved = resolve("device", fields, {"table": name}, {}, None)
    check_inputs(fields, resolved, ["other"])  # which is not set
    if not cause:
        check_inputs(fields, resolved)
        return
    with pytest.raises(ConfigError) as caught:
        check_inputs(fields, resolved)
    assert (caught.value.cause, caught.value.cure) == (cause, "correct --table")


def test_what_is_missing_is_shown_beside_what_is_set() -> None:
    fields = [Field("engine", str, REQUIRED, "the package"), Field("threads", int, 2, "of the engine")]
    with pytest.raises(ConfigError, match="engine is not set"):
        resolve("device", fields, {"threads": "3"}, {}, None)
    shown = resolve("device", fields, {"threads": "3"}, {}, None, partial=True)
    assert shown.missing == {"engine"} and shown.values["engine"] is None
    assert shown.show() == "[device]\n# engine is not set, and must be\nthreads = 3  # --threads"
    assert not resolve("device", fields, {"engine": "x"}, {}, None, partial=True).missing
