"""The configuration file: what the reference reads from it, and what the operator is told."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rnsfast.errors import ConfigError, StorageError
from rnsfast.interfaces.common import CommonConfig
from rnsfast.node.config import (
    NodeConfig,
    check_sections,
    ensure_layout,
    find_config_dir,
    load_or_create,
    parse_config,
    read_config,
)
from rnsfast.node.configdefault import DEFAULT_CONFIG, LAYOUT
from rnsfast.node.configfile import Section, parse
from tests.vectors_support import Case, by_name, vectors

FILE = Path("config")


def as_tree(section: Section) -> dict[str, Any]:
    """Everything in a section as plain values, read the way an option is read."""
    tree: dict[str, Any] = {}
    for key in section.keys:
        value = section._read(key)
        tree[key] = "" if value is None else value
    return {**tree, **{child.name: as_tree(child) for child in section.children}}


@pytest.mark.parametrize("case", vectors("node", "config", "parse"), ids=by_name)
def test_text_means_what_it_means_to_the_reference(case: Case) -> None:
    data = bytes.fromhex(case["hex"]) if "hex" in case else case["text"].encode()
    if "error" in case:
        with pytest.raises(ConfigError, match=r"^config:\d+: "):
            as_tree(parse(data, FILE)[0])
    else:
        assert as_tree(parse(data, FILE)[0]) == case["parsed"]


def one_value(value: str | list[str]) -> Section:
    written = ", ".join(f'"{item}"' for item in value) + "," if isinstance(value, list) else f'"{value}"'
    root, _ = parse(f"[[[x]]]\nv = {written}\n".replace("[[[x]]]", "[x]").encode(), FILE)
    return root.children[0]


@pytest.mark.parametrize("case", vectors("node", "config", "coerce"), ids=lambda case: repr(case["text"]))
def test_values_convert_as_in_the_reference(case: Case) -> None:
    section = one_value(case["value"])
    readers = {"as_bool": section.boolean, "as_int": section.integer, "as_float": section.number}
    for name, read in readers.items():
        if "ok" in case[name]:
            assert read("v") == case[name]["ok"]
        else:
            with pytest.raises(ConfigError, match=r"^config:2: \[x\]: v: "):
                read("v")
    # Not as in the reference: an empty value is not set, so there is no list with an empty text in it.
    assert section.words("v") == ([] if case["value"] == "" else case["as_list"]["ok"])


#: Name in the vectors -> our option, where they differ.
RENAMED = {
    "transport_enabled": "enable_transport",
    "remote_management_enabled": "enable_remote_management",
    "interface_management_enabled": "enable_interface_management",
    "allow_probes": "respond_to_probes",
    "autoconnect_unverified": "autoconnect_unverified_implementations",
    "inbound_data_queue_length": "qlen_in_data",
    "inbound_announce_queue_length": "qlen_in_announce",
    "inbound_pr_queue_length": "qlen_in_pr",
    "inbound_il_queue_length": "qlen_in_il",
}
DERIVED = {"local_socket_path", "use_af_unix", "rpc_addr", "rpc_type"}  # made from options elsewhere
ABSENT = {"network_identity": None, "autoconnect_discovered_interfaces": 0, "required_discovery_value": 16}


def expected_config(values: Case) -> dict[str, Any]:
    expected = {}
    for name, value in values.items():
        if name in DERIVED:
            continue
        if name in ABSENT and value in (False, None):
            value = ABSENT[name]
        elif name == "rpc_key":
            value = bytes.fromhex(value)
        elif isinstance(value, list):
            value = tuple(map(bytes.fromhex, value))
            value = tuple(dict.fromkeys(value))  # an identity listed twice is allowed once, all the same
        expected[RENAMED.get(name, name)] = value
    return expected


@pytest.mark.parametrize("case", vectors("node", "config", "reticulum"), ids=by_name)
def test_node_options_have_the_effect_they_have_in_the_reference(case: Case) -> None:
    if case["result"] != "ok":
        with pytest.raises(ConfigError, match=r"^config:\d+: "):
            parse_config(case["text"].encode())
        return
    config = parse_config(case["text"].encode()).config
    arguments = case["constructor"]
    level = config.effective_loglevel(arguments.get("verbosity", 0), arguments.get("loglevel"))
    assert (level, config.logtimestamps) == (case["loglevel"], case["logtimestamps"])
    base = expected_config(vectors("node", "config", "reticulum")[0]["reticulum"])
    expected = base | expected_config(case.get("reticulum_changed", {}))
    assert {name: getattr(config, name) for name in expected} == expected


def test_the_first_start_writes_a_file_that_reads_back_without_a_warning(tmp_path: Path) -> None:
    loaded = load_or_create(tmp_path)
    assert loaded.created and not load_or_create(tmp_path).created
    assert loaded.path.read_text() == DEFAULT_CONFIG
    assert stat.S_IMODE(loaded.path.stat().st_mode) == 0o600
    assert loaded.warnings == [] and loaded.sections == []
    assert loaded.config == NodeConfig(loglevel=4)
    stock = vectors("node", "config", "default_config_values")
    assert stock["logging"]["loglevel"] == "4" and stock["reticulum"]["instance_name"] == loaded.config.instance_name


def test_the_examples_in_the_first_file_are_right_once_their_marks_are_taken_away() -> None:
    lines = DEFAULT_CONFIG.splitlines()
    start = next(i for i, line in enumerate(lines) if "[[Upstream]]" in line)
    shown = [line.removeprefix("# ") if line.startswith(("# [[", "#     ")) else line for line in lines[start:]]
    text = "\n".join([*lines[:start], *shown[:-2]])
    loaded = parse_config(text.encode())
    assert [section.kind for section in loaded.sections] == [
        "TCPClientInterface",
        "TCPServerInterface",
        "BackboneInterface",
        "UDPInterface",
    ]
    assert loaded.warnings == [] and all(s.enabled and s.unknown() == [] for s in loaded.sections)


# -- directories ------------------------------------------------------------------------------------------------------


def test_directory_search_takes_the_first_that_holds_a_config_file(tmp_path: Path) -> None:
    system, home = tmp_path / "etc", tmp_path / "home"
    dotconfig = home / ".config" / "reticulum"
    for directory in (system, dotconfig):
        directory.mkdir(parents=True)

    def found(explicit: str | None = None) -> Path:
        return find_config_dir(explicit, system=system, home=home)

    assert found() == home / ".reticulum"  # the others are there, without a file in them
    (dotconfig / "config").touch()
    assert found() == dotconfig
    (system / "config").touch()
    assert found() == system
    assert found("~/mine") == Path("~/mine")
    assert not (home / ".reticulum").exists()


def test_layout_is_for_the_owner_only_and_can_be_made_twice(tmp_path: Path) -> None:
    directory = tmp_path / "node"
    for _ in range(2):
        ensure_layout(directory)
    for path in (directory, *(directory / name for name in LAYOUT)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_layout_sets_a_file_aside_that_stands_where_a_directory_belongs(tmp_path: Path) -> None:
    (tmp_path / "storage").write_bytes(b"x")
    ensure_layout(tmp_path)
    assert (tmp_path / "storage" / "cache").is_dir()
    assert (tmp_path / "storage.damaged-1").read_bytes() == b"x"


def test_layout_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"file/node: this directory cannot be created"):
        ensure_layout(tmp_path / "file" / "node")


# -- faults of the file -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"[interfaces]\n[[A]]\nx=1\n[[B]]\n[[A]]\n", "config:5: [[A]]: this section is there already, on line 2"),
        (b"[reticulum]\na = 1\nb = 2\na = 3\n", "config:4: a: this option is there already, on line 2"),
        (b"[reticulum]\ninstance_name = 'abc\n", "config:2: instance_name: the closing ' is missing"),
        (b"[reticulum]\nx = '''abc\n\n", "config:2: x: the closing ''' is missing"),
        (b'[reticulum]\nx = "a" b\n', 'config:2: x: there is text after the closing "'),
        (b"[reticulum]\nx = a\n\xff\n", "config:3: there are bytes that are not UTF-8"),
        (b"[reticulum]\n" + bytes(20), "config:2: there is a zero byte"),
        (b"[reticulum]\n[[[deep]]]\n", "config:2: [[[deep]]]: the brackets do not fit"),
        (b"[reticulum\n", "config:1: '[reticulum' is not a section heading"),
        (b"[reticulum]\nshare_instance: no\n", "write '=' instead of ':'"),
        (b"[reticulum]\npassphrase hunter2\n", "config:2: this line is neither"),
        (b"; hello\n", "config:1: a comment starts with '#'"),
        (b"reticulum = 5\n", "config:1: reticulum: is a value here, the section [reticulum] is accepted"),
        (b"[reticulum]\n[[instance_name]]\n", "instance_name: is a section here"),
        (b"[reticulum]\nenable_transport = maybe\n", "config:2: [reticulum]: enable_transport: 'maybe' is neither"),
        (b"[reticulum]\nshared_instance_port = 0\n", "'0' is not within 1..65535"),
        (b"[reticulum]\ninstance_name = a, b\n", "the unquoted comma makes this a list of 2 ('a', 'b')"),
        (
            b"[reticulum]\ninstance_name = %(nope)s\n",
            "config:2: [reticulum]: instance_name: '%(nope)s' cannot be",
        ),
        (b"[reticulum]\ninstance_name = %(instance_name)s\n", "cannot be filled in"),
        (b"[logging]\nloglevel = info\n", "config:2: [logging]: loglevel: 'info' is not a whole number"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_fault_is_one_sentence_with_its_place(data: bytes, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(data)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert caught.value.file == "config"


@pytest.mark.parametrize("what", ["directory", "missing", "pipe", "link to nothing", "huge"])
def test_what_is_no_readable_file_is_one_sentence(what: str, tmp_path: Path) -> None:
    path = tmp_path / "config"
    match what:
        case "directory":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "link to nothing":
            path.symlink_to(tmp_path / "nowhere")
        case "huge":
            path.write_bytes(b"#" * (4 << 20) + b"\n")
    with pytest.raises(ConfigError, match="config: ") as caught:
        read_config(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_may_not_be_read_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config"
    path.touch()

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match=r"cannot be read \(Permission denied\)"):
        read_config(path)


@given(st.binary(max_size=300) | st.text(alphabet="[]='\"#,%()sax \n\t", max_size=120).map(str.encode))
def test_no_text_raises_anything_but_a_configuration_error(data: bytes) -> None:
    try:
        loaded = parse_config(data)
        for section in loaded.sections:
            section.unknown()
            as_tree(section)
    except ConfigError as error:
        assert "\n" not in str(error)


@given(
    st.lists(
        st.sampled_from(
            ["", "# c", "k{n} = 1", "k{n} = '''a", "  k{n} = '''a'''  # c", "[a{n}]", "[[b{n}]] # c", '"k {n}" = "="']
        ),
        max_size=12,
    )
)
def test_every_option_and_section_is_found_on_its_own_line(templates: list[str]) -> None:
    lines = ["[top]"]
    for n, template in enumerate(templates):
        lines.append(template.replace("{n}", str(n)))
        if template.endswith("'''a"):
            lines += ["# inside", "= [x]", "end'''"]

    def check(section: Section) -> None:
        for key in section.keys:
            assert key in lines[section.line_of(key) - 1]
        for child in section.children:
            assert f"[{child.name}]" in lines[child.line - 1]
            check(child)

    check(parse("\n".join(lines).encode(), FILE)[0])


# -- warnings ---------------------------------------------------------------------------------------------------------


def test_misspelt_names_are_reported_with_the_nearest_right_one() -> None:
    text = b"[reticulum]\nenabel_transport = yes\n[intrefaces]\n[logging]\nlogevel = 3\n"
    assert parse_config(text).warnings == [
        "config:3: unknown section [intrefaces], did you mean 'interfaces'?",
        "config:2: [reticulum]: unknown option 'enabel_transport', did you mean 'enable_transport'?",
        "config:5: [logging]: unknown option 'logevel', did you mean 'loglevel'?",
    ]


def test_values_that_go_nowhere_are_reported() -> None:
    assert parse_config(b"x = 1\n[interfaces]\nenabled = yes\n[[A]]\n").warnings == [
        "config:1: x: stands before the first [section] and has no effect",
        "config:3: [interfaces]: enabled: stands before the first [[section]] and has no effect",
    ]
    assert "says nothing" in parse_config(b"# only a comment\n").warnings[0]


def test_values_the_reference_ignores_are_ignored_with_a_warning() -> None:
    loaded = parse_config(
        b"[reticulum]\nrpc_key = beef5\nshared_instance_type = pigeon\nautoconnect_interface_mode = gatway\n"
        b"[logging]\nloglevel = 99\n"
    )
    config = loaded.config
    assert (config.rpc_key, config.shared_instance_type, config.autoconnect_interface_mode) == (None, None, None)
    assert config.loglevel == 8
    assert len(loaded.warnings) == 4 and not any("beef5" in warning for warning in loaded.warnings)


def test_a_lone_percent_sign_is_just_that() -> None:
    assert parse_config(b"[reticulum]\ninstance_name = 100%\n").config.instance_name == "100%"
    assert parse_config(b"[reticulum]\ninstance_name = %(\n").config.instance_name == "%("


def test_the_rpc_key_does_not_appear_when_a_configuration_is_printed() -> None:
    assert "beef" not in repr(parse_config(b"[reticulum]\nrpc_key = beef\n").config)


def test_global_defaults_reach_the_interfaces_and_nought_means_built_in() -> None:
    text = b"[reticulum]\nenable_transport = yes\ndefault_gravity = 4\nic_burst_freq = 21\nic_new_time = 0\n"
    defaults = parse_config(text).config.interface_defaults()
    assert (defaults.transport, defaults.gravity, defaults.ic_burst_freq, defaults.ic_new_time) == (
        True,
        4,
        21.0,
        7200.0,
    )


# -- faults of interface sections -------------------------------------------------------------------------------------

GOOD = "[interfaces]\n[[Good]]\ntype = TCPServerInterface\nenabled = yes\nlisten_port = 4242\n[[Other]]\n"


def client(section: Section) -> CommonConfig:
    """Stands for the registry of interface types."""
    types = {"TCPServerInterface": "listen_port", "TCPClientInterface": "target_port"}
    section.integer(section.choice("type", types), 1, 65535)
    if section.kind == "TCPClientInterface":
        section.integer("fixed_mtu", 500, default=None)
    return CommonConfig.from_section(section)


SERVER, CLIENT = "type=TCPServerInterface\nlisten_port=1\n", "type=TCPClientInterface\ntarget_port=1\n"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (f"{CLIENT}fixed_mtu = 485", "config:10: [[Other]]: fixed_mtu: '485' is not at least 500"),
        (
            "type=TCPServerInterface\nlisten_port = 70000",
            "config:9: [[Other]]: listen_port: '70000' is not within 1..6",
        ),
        (
            "type=TCPServerInterface\nlisten_port = None",
            "[[Other]]: listen_port: is set to nothing, accepted is a",
        ),
        ("type=TCPServerInterface\nlisten_port =", "config:9: [[Other]]: listen_port: is set to nothing"),
        (
            f"{SERVER}interface_mode = gatway",
            "interface_mode: 'gatway' is not known, accepted is one of full, ",
        ),
        ("type=TCPServerInterfaec", ", TCPClientInterface, did you mean 'TCPServerInterface'?"),
        ("listen_port=1", "config:6: [[Other]]: type: is missing, accepted is one of TCPServerInterface, TCPClientI"),
        (
            f"{SERVER}passphrase = se,cret",
            "passphrase: the unquoted comma makes this a list of 2, accepted is one",
        ),
        (f"{SERVER}bitrate = fast", "bitrate: 'fast' is not a whole number"),
    ],
)
def test_a_faulty_section_is_named_and_the_good_one_works(options: str, sentence: str) -> None:
    loaded = parse_config(f"{GOOD}enabled=yes\n{options}\n".encode())
    checked = check_sections(loaded.sections, client)
    assert [section.name for section, _ in checked.good] == ["Good"]
    ((section, error),) = checked.failed
    assert section.name == "Other" and sentence in str(error) and "cret" not in str(error)
    with pytest.raises(ConfigError) as caught:
        check_sections(loaded.sections, client, strict=True)
    assert str(caught.value) == str(error)


def test_a_wrong_enabled_counts_as_enabled() -> None:
    loaded = parse_config(f"{GOOD}enabled = perhaps\ntype=TCPClientInterface\ntarget_port=1\n".encode())
    checked = check_sections(loaded.sections, client)
    assert "config:7: [[Other]]: enabled: 'perhaps' is neither" in str(checked.failed[0][1])


def test_a_fault_in_a_disabled_section_is_a_warning() -> None:
    loaded = parse_config(f"{GOOD}type=TCPClientInterface\ntarget_port=1\nbitrate = fast\n".encode())
    checked = check_sections(loaded.sections, client, strict=True)
    assert len(checked.good) == 1 and [s.name for s in checked.disabled] == ["Other"] and not checked.failed
    assert checked.warnings[0].startswith("config:9: [[Other]]: bitrate: 'fast'")


def test_the_word_none_and_an_empty_value_mean_not_set() -> None:
    options = "type=TCPClientInterface\ntarget_port=1\nenabled=1\npassphrase=None\nnetwork_name=\nbitrate=None\nmode="
    ((_, config),) = check_sections(parse_config(f"{GOOD}{options}".encode()).sections[1:], client).good
    assert config == CommonConfig(name="Other")


def test_both_spellings_of_the_mode_know_gateway() -> None:
    options = "type=TCPClientInterface\ntarget_port=1\nenabled=1\ninterface_mode = gateway"
    ((_, config),) = check_sections(parse_config(f"{GOOD}{options}".encode()).sections[1:], client).good
    assert config.mode == 6


def test_a_misspelt_option_is_a_warning_and_a_stock_option_is_none() -> None:
    options = "type=TCPServerInterface\nlisten_port=1\nenabled=1\nlisten_pi=x\ni2p_tunneled=no\ntransport_identity=y"
    checked = check_sections(parse_config(f"{GOOD}{options}".encode()).sections, client)
    assert checked.warnings == ["config:10: [[Other]]: unknown option 'listen_pi', did you mean 'listen_ip'?"]


def test_a_misspelt_required_option_is_explained_beside_the_fault() -> None:
    checked = check_sections(
        parse_config(f"{GOOD}type=TCPServerInterface\nenabled=1\nlisten_prot=1".encode()).sections, client
    )
    assert "listen_port: is missing" in str(checked.failed[0][1])
    assert checked.warnings == ["config:9: [[Other]]: unknown option 'listen_prot', did you mean 'listen_port'?"]


def test_what_an_unquoted_hash_does_to_a_value_is_said_without_giving_a_secret_away() -> None:
    options = "passphrase = hunter#2\nnetwork_name = home # net\nbitrate = 5#x\nmode = full # usual\nx = '#'#c\ny = #"
    warnings = parse_config(f"{GOOD}{options}".encode()).warnings
    assert [warning.split(": the unquoted")[0] for warning in warnings] == [
        "config:7: [[Other]]: passphrase",
        "config:8: [[Other]]: network_name",
        "config:9: [[Other]]: bitrate",
    ]
    assert "the 6 characters before it are the value" in warnings[0] and "hunter" not in warnings[0]
    assert "the value is 'home'" in warnings[1]


@pytest.mark.parametrize(
    ("key", "needed"),
    [("respond_to_probes", "enable_transport"), ("autoconnect_discovered_interfaces", "discover_interfaces")],
)
def test_an_option_without_the_one_it_needs_is_told_with_file_and_line(key: str, needed: str) -> None:
    loaded = parse_config(f"[reticulum]\n{key} = 1\n".encode())
    assert loaded.warnings == [f"config:2: [reticulum]: {key}: has no effect without {needed}"]
    assert not parse_config(f"[reticulum]\n{key} = 1\n{needed} = yes\n".encode()).warnings
    assert not parse_config(f"[reticulum]\n{key} = 0\nshare_instance = yes\n".encode()).warnings
