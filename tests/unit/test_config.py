"""Settings: where each is taken from, and what is said about a wrong one."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from moorage import config
from moorage.config import ClientConfig, CoordinatorConfig, EtcdConfig, WorkerConfig, client_config, load, to_toml
from moorage.errors import NotFound, UsageError
from moorage.trust import TlsFiles

TLS = TlsFiles("/tls/ca.pem", "/tls/cert.pem", "/tls/key.pem")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of its own: its home folder, with system and dev files below it instead of in /etc and /run."""
    monkeypatch.setattr(config, "SYSTEM_FILE", str(tmp_path / "etc.toml"))
    monkeypatch.setattr(config, "DEV_CLIENT_FILE", str(tmp_path / "dev.toml"))
    for name in ("ca.pem", "cert.pem", "key.pem"):
        (tmp_path / name).touch()
    (tmp_path / ".config/moorage").mkdir(parents=True)
    return tmp_path


def tls_table(home: Path) -> str:
    return f'[tls]\nca = "{home}/ca.pem"\ncert = "{home}/cert.pem"\nkey = "{home}/key.pem"\n'


def write_all(home: Path) -> None:
    (home / "dev.toml").write_text('coordinator = "dev:1"\noutput = "yaml"\n' + tls_table(home))
    (home / "etc.toml").write_text('coordinator = "system:1"\noutput = "json"\n')
    (home / ".config/moorage/config.toml").write_text('coordinator = "user:1"\n')


def test_a_setting_comes_from_the_first_place_that_names_it(home: Path) -> None:
    write_all(home)
    environ = {"HOME": str(home)}
    assert client_config(environ=environ).coordinator == "user:1"
    assert client_config(environ=environ).output == "json"
    (home / ".config/moorage/config.toml").unlink()
    assert client_config(environ=environ).coordinator == "system:1"
    (home / "etc.toml").unlink()
    assert client_config(environ=environ).coordinator == "dev:1"
    assert client_config(environ=environ).output == "yaml"
    environ["MOORAGE_COORDINATOR"] = "variable:1"
    assert client_config(environ=environ).coordinator == "variable:1"
    assert client_config({"coordinator": "flag:1"}, environ=environ).coordinator == "flag:1"


def test_a_flag_that_was_not_given_hides_nothing(home: Path) -> None:
    write_all(home)
    assert client_config({"coordinator": None, "output": None}, environ={"HOME": str(home)}).coordinator == "user:1"


def test_a_file_named_explicitly_stands_for_all_files(home: Path) -> None:
    write_all(home)
    only = home / "only.toml"
    only.write_text('coordinator = "only:1"\n' + tls_table(home))
    assert client_config(environ={"HOME": str(home), "MOORAGE_CONFIG": str(only)}).output == "table"
    assert client_config(config=str(only), environ={"HOME": str(home)}).coordinator == "only:1"


def test_an_explicit_file_that_is_missing_is_an_error(home: Path) -> None:
    with pytest.raises(NotFound, match=r"nowhere\.toml does not exist"):
        client_config(config=str(home / "nowhere.toml"), environ={"HOME": str(home)})


def test_certificate_paths_in_a_file_are_relative_to_it(home: Path) -> None:
    (home / "dev.toml").write_text('coordinator = "a:1"\n[tls]\nca = "ca.pem"\ncert = "cert.pem"\nkey = "key.pem"\n')
    assert client_config(environ={"HOME": str(home)}).tls.ca == str(home / "ca.pem")


def test_without_a_coordinator_the_error_says_how_to_name_one(home: Path) -> None:
    with pytest.raises(UsageError) as caught:
        client_config(environ={"HOME": str(home)})
    assert "moorage dev up" in caught.value.hint
    assert "MOORAGE_COORDINATOR" in caught.value.hint


def test_without_a_certificate_the_error_names_what_lacks(home: Path) -> None:
    environ = {"HOME": str(home), "MOORAGE_COORDINATOR": "a:1", "MOORAGE_TLS_CA": str(home / "ca.pem")}
    with pytest.raises(UsageError, match=r"tls\.cert, tls\.key"):
        client_config(environ=environ)


def test_a_certificate_file_that_is_gone_is_named(home: Path) -> None:
    write_all(home)
    (home / "key.pem").unlink()
    with pytest.raises(NotFound, match=r"key\.pem does not exist"):
        client_config(environ={"HOME": str(home)})


def test_an_unknown_output_format_is_refused_with_the_known_ones(home: Path) -> None:
    write_all(home)
    with pytest.raises(UsageError) as caught:
        client_config({"output": "xml"}, environ={"HOME": str(home)})
    assert "table, json, yaml" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('coordinater = "a:1"', "coordinater"),
        ("coordinator = 7", "coordinator"),
        ('output = "xml"', "xml"),
        ("coordinator = ", "not valid TOML"),
    ],
)
def test_a_wrong_client_file_is_named_with_what_is_wrong(home: Path, text: str, said: str) -> None:
    (home / "etc.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        client_config(environ={"HOME": str(home)})
    assert "etc.toml" in caught.value.message
    assert said in caught.value.message


def test_several_coordinators_are_separated_by_commas() -> None:
    assert ClientConfig(coordinator="a:1, b:2,", tls=TLS).coordinators == ["a:1", "b:2"]


def worker() -> WorkerConfig:
    return WorkerConfig(
        cluster="c",
        node='n"\\\n\x7f é',
        address="10.0.0.1",
        listen="10.0.0.1:7400",
        store="file:///store",
        tls=TLS,
        etcd=EtcdConfig(endpoints=["a:1", "b:2"], tls=TLS, user="u", password_file="/p"),
        labels={"zone": "a", "odd key": "b", "": "c"},
    )


def test_what_is_written_as_toml_is_read_back_the_same(tmp_path: Path) -> None:
    path = tmp_path / "worker.toml"
    path.write_text(to_toml(worker()))
    assert load(path, WorkerConfig) == worker()
    coordinator = CoordinatorConfig(
        cluster="c", listen="l", advertise="a", store="s", tls=TLS, etcd=EtcdConfig(endpoints=["a:1"])
    )
    path.write_text(to_toml(coordinator))
    assert load(path, CoordinatorConfig) == coordinator


def test_daemon_settings_that_are_missing_wrong_or_unknown_are_named(tmp_path: Path) -> None:
    path = tmp_path / "worker.toml"
    with pytest.raises(NotFound, match=r"worker\.toml does not exist"):
        load(path, WorkerConfig)
    good = to_toml(worker())
    for bad, said in (
        (good.replace("listen", "listn"), "listn"),
        (good.replace('cluster = "c"\n', ""), "cluster"),
        (good.replace("lease_seconds = 10", 'lease_seconds = "10"'), "lease_seconds"),
    ):
        path.write_text(bad)
        assert bad != good
        tomllib.loads(bad)
        with pytest.raises(UsageError, match=said):
            load(path, WorkerConfig)


def test_the_etcd_password_stands_in_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("secret\n")
    assert EtcdConfig(endpoints=[], password_file=str(tmp_path / "password")).password() == "secret"
    assert EtcdConfig(endpoints=[]).password() == ""
    with pytest.raises(NotFound, match="nothing-here"):
        EtcdConfig(endpoints=[], password_file=str(tmp_path / "nothing-here")).password()
